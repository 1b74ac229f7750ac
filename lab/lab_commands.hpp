// SPDX-License-Identifier: Apache-2.0
// The subcommands of `weft-lab`; cli/program.hpp says how each behaves.
#pragma once

#include <CLI/CLI.hpp>

namespace weft::program {

void add_train(CLI::App& app);
void add_simulate(CLI::App& app);

}  // namespace weft::program
