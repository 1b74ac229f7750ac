// SPDX-License-Identifier: Apache-2.0
// What survive_bench measures on GPUs; declared without CUDA.
#pragma once

#include <cstdint>
#include <functional>

#include "report/json_text.hpp"

namespace weft::bench {

// Called with a row of results whenever there is one, or more of the last: `is_more`.
using TellRow = std::function<void(const nlohmann::ordered_json& row, bool is_more)>;

// Deaths of processes that share the GPUs, in eager calls and replayed graphs, a row for each. It
// forks: before anything of CUDA is used. Throws Error (kUnsupported, kNotAvailable) without a GPU.
void measure_gpu_deaths(int num_deaths, uint64_t seed, const TellRow& tell);

// What cases A and D cost more with PeerLoss::kShrink than without while nobody dies, both in turns
// in this process, a rank for each GPU: a row for each. Throws as above.
void measure_gpu_cost(int num_samples, bool is_small, const TellRow& tell);

}  // namespace weft::bench
