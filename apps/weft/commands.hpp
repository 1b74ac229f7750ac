// SPDX-License-Identifier: Apache-2.0
// The subcommands of `weft`; cli/program.hpp says how each behaves.
#pragma once

#include <CLI/CLI.hpp>

namespace weft::program {

void add_info(CLI::App& app);
void add_plan(CLI::App& app);
void add_tune(CLI::App& app);
void add_check(CLI::App& app);
void add_limits(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace weft::program
