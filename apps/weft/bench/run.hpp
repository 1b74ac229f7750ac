// SPDX-License-Identifier: Apache-2.0
// Measures the operations on the ranks of a group.
#pragma once

#include <vector>

#include "bench_options.hpp"
#include "results.hpp"
#include "weft/group.hpp"

namespace weft::program {

struct BenchResult {
  ResultRow row;
  std::vector<double> samples_us;  // slowest rank of each
};

struct BenchReport {
  int64_t row_bytes = 0;
  CopyRates rates = {};  // plain copies of rows of this size
  std::vector<BenchResult> results;
};

// Collective. The report is the same on every rank.
[[nodiscard]] BenchReport run_bench(const Group& group, const BenchOptions& options);

}  // namespace weft::program
