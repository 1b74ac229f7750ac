// SPDX-License-Identifier: Apache-2.0
// Common parts of the programs of this tree: subcommands, one line for an error, exit codes, care
// for the files that they write.
//
// A subcommand adds itself to the app with a callback that does the work. Exit codes: 0 good; 1 a
// check failed or a run broke (throw CLI::RuntimeError(1) after having printed why, or let a
// weft::Error out); 2 bad usage (throw CLI::ValidationError).
#pragma once

#include <initializer_list>
#include <string>

#include "cli/forward.hpp"

namespace weft::program {

// Parses the command line, runs the subcommand and returns the exit code for main().
[[nodiscard]] int run_program(CLI::App& app, int argc, char** argv);

// A file that a command reads, or writes when its work is done.
struct NamedPath {
  const char* option;
  const std::string& path;  // empty: not asked for
};

// Before the work: throws CLI::ValidationError where an output is an input or another output, Error
// (kFile) naming a path that could not be written.
void check_outputs(
    std::initializer_list<NamedPath> outputs, std::initializer_list<NamedPath> inputs = {}
);

}  // namespace weft::program
