// SPDX-License-Identifier: Apache-2.0
// What survive_bench measures on GPUs; declared without CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "report/json_text.hpp"

namespace weft::bench {

// Deaths of processes that share the GPUs, in eager calls and replayed graphs, a row of results for
// each. It forks: before anything of CUDA is used.
[[nodiscard]] std::vector<nlohmann::ordered_json> measure_gpu_deaths(int num_deaths, uint64_t seed);

// What cases A and D cost more with PeerLoss::kShrink than without while nobody dies, both in turns
// in this process, a rank for each GPU: rows of results.
[[nodiscard]] std::vector<nlohmann::ordered_json> measure_gpu_cost(int num_samples, bool is_small);

}  // namespace weft::bench
