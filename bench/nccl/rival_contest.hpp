// SPDX-License-Identifier: Apache-2.0
// The NCCL rivals and their kernels on one case: checked, then timed.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "measure/results.hpp"
#include "nccl/rival_library.hpp"
#include "rival_lists.hpp"

namespace weft::bench {

struct NcclContestOptions {
  std::vector<RivalWay> ways = {RivalWay::kPerRoute, RivalWay::kPerExpert, RivalWay::kPerRank};
  int iterations = 50;
  int warmup = 5;
  uint64_t seed = 1;           // of the routing, as `weft bench --seed`
  double link_gbps = 0;        // that can leave a GPU; 0: rows get no limit
  double local_copy_gbps = 0;  // read + written by a copy inside a GPU; 0: no limit
};

// A row, and what its kernel alone reads and writes on one GPU (0 with communication).
struct NcclResult {
  program::ResultRow row;
  double kernel_bytes = 0;
};

[[nodiscard]] std::string way_name(RivalWay way);

// GPUs 0 .. num_gpus - 1 of this process, each one rank of every case. Reports case by case, by the
// index in `cases`; a result that is not what the host expects has `checked` false.
using NcclReport = std::function<void(size_t, const std::vector<NcclResult>&)>;
void run_nccl_cases(
    const NcclLibrary& library,
    std::span<const RivalCase> cases,
    const NcclContestOptions& options,
    const NcclReport& report
);

}  // namespace weft::bench
