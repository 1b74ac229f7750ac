// SPDX-License-Identifier: Apache-2.0
// Weft and its rivals on the same routing and rows, in turns.
#pragma once

#include <string>
#include <vector>

#include "measure/results.hpp"
#include "mpi/rival.hpp"
#include "weft/group.hpp"

namespace weft::bench {

struct ContestOptions {
  RivalShape shape = {
      .max_tokens = 2048,
      .hidden = 2048,
      .dtype = DType::kBFloat16,
      .num_experts = 64,
      .topk = 8,
      .pad_multiple = 128,
      .num_threads = 1,
  };
  double skew = 0;
  uint64_t seed = 1;
  int iterations = 50;
  int warmup = 5;
};

struct ContestResult {
  program::CopyRates rates = {};         // plain copies of rows of this size
  std::vector<program::ResultRow> rows;  // one for each operation and rival
};

// Collective, between MPI_Init and MPI_Finalize; the group has the ranks of MPI_COMM_WORLD. All
// outputs are compared before anything is timed.
[[nodiscard]] ContestResult run_contest(const Group& group, const ContestOptions& options);

}  // namespace weft::bench
