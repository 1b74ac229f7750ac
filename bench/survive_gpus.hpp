// SPDX-License-Identifier: Apache-2.0
// Measurements of survive_bench on GPUs; declared without CUDA.
#pragma once

#include <cstdint>
#include <functional>

#include "report/json_text.hpp"

namespace weft::bench {

// Called with the rows of a measurement, as far as it has come.
using TellRows = std::function<void(const nlohmann::ordered_json& rows)>;

// How much is asked for; on GPUs of eager calls and of replayed graphs each.
struct DeathCounts {
  int deaths = 0;        // after which nobody comes
  int returns = 0;       // deaths after which a new process takes the place
  double seconds = 1e9;  // after which nothing more is begun, on GPUs
  bool are_in_domains = false;
};

// Deaths of processes that share the GPUs, in eager calls and replayed graphs in turns, between
// domains in eager calls only. It forks: before anything of CUDA is used. Throws Error
// (kUnsupported, kNotAvailable) without a GPU.
void measure_gpu_deaths(const DeathCounts& counts, uint64_t seed, const TellRows& tell);

// Measures what cases A and D cost more with PeerLoss::kShrink than without while no rank dies,
// both in turns in this process, a rank for each GPU, or two domains of these and at least two
// ranks: a row for each. Throws as above.
[[nodiscard]] nlohmann::ordered_json measure_gpu_cost(
    int num_samples, bool is_small, bool are_in_domains
);

}  // namespace weft::bench
