// SPDX-License-Identifier: Apache-2.0
// The routing that `weft bench` cycles through.
#pragma once

#include <vector>

#include "bench_options.hpp"
#include "plan/build.hpp"

namespace weft::program {

struct BenchRouting {
  int num_experts = 0;
  int topk = 0;
  std::vector<std::vector<RouteTable>> versions;  // [versions][num_ranks]
};

// Made up or read from the file. Throws Error (kFile) for a file of another number of ranks.
[[nodiscard]] BenchRouting bench_routing(const BenchOptions& options, int num_ranks);

}  // namespace weft::program
