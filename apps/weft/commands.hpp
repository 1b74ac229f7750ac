// SPDX-License-Identifier: Apache-2.0
// The subcommands. Each adds itself to the app with a callback that does the work.
//
// Exit codes: 0 good; 1 a check failed or a run broke (throw CLI::RuntimeError(1) after having
// printed why, or let a weft::Error out); 2 bad usage (throw CLI::ValidationError).
#pragma once

#include <CLI/CLI.hpp>

namespace weft::program {

void add_info(CLI::App& app);
void add_plan(CLI::App& app);
void add_simulate(CLI::App& app);
void add_train(CLI::App& app);
void add_tune(CLI::App& app);
void add_check(CLI::App& app);
void add_limits(CLI::App& app);
void add_bench(CLI::App& app);

}  // namespace weft::program
