// SPDX-License-Identifier: Apache-2.0
// What `weft bench` shows: a table for people, a page with plots.
#pragma once

#include <string>

#include "bench_options.hpp"
#include "bench_run.hpp"
#include "table.hpp"

namespace weft::program {

// One line that says what was measured.
[[nodiscard]] std::string bench_case_text(const BenchReport& report);
[[nodiscard]] Table bench_table(const BenchReport& report, bool is_checked);
// Throws Error (kFile).
void save_bench_page(const BenchReport& report, const BenchOptions& options);

}  // namespace weft::program
