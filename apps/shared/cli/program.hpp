// SPDX-License-Identifier: Apache-2.0
// What the programs of this tree have in common: subcommands, one line for an error, exit codes.
//
// A subcommand adds itself to the app with a callback that does the work. Exit codes: 0 good; 1 a
// check failed or a run broke (throw CLI::RuntimeError(1) after having printed why, or let a
// weft::Error out); 2 bad usage (throw CLI::ValidationError).
#pragma once

#include <CLI/CLI.hpp>

namespace weft::program {

// Parses the command line, runs the subcommand and returns the exit code for main().
[[nodiscard]] int run_program(CLI::App& app, int argc, char** argv);

}  // namespace weft::program
