// SPDX-License-Identifier: Apache-2.0
// Measures the operations on the ranks of a group.
#pragma once

#include <string>
#include <vector>

#include "bench/options.hpp"
#include "measure/bench_check.hpp"
#include "measure/results.hpp"
#include "report/table.hpp"
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

[[nodiscard]] bool is_good(const Verdict& verdict, BenchOp op);
// What the CPU's and the GPUs' rows have in common.
[[nodiscard]] BenchResult bench_result(
    const Group& group,
    const BenchOptions& options,
    const BenchRouting& routing,
    std::vector<double> samples_us
);

// Collective. The report is the same on every rank.
[[nodiscard]] BenchReport run_bench(const Group& group, const BenchOptions& options);

// One line that says what was measured.
[[nodiscard]] std::string bench_case_text(const BenchReport& report);
[[nodiscard]] Table bench_table(const BenchReport& report, bool is_checked);
// Throws Error (kFile).
void save_bench_page(const BenchReport& report, const BenchOptions& options);

}  // namespace weft::program
