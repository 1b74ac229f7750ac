// SPDX-License-Identifier: Apache-2.0
// The program `weft-lab` trains a small model over Weft and simulates large groups.
#include <CLI/CLI.hpp>

#include "cli/program.hpp"
#include "simulate/command/command.hpp"
#include "train/command/command.hpp"

namespace {

constexpr const char* kFooter = R"(Start here:
  weft-lab train FILE             one minute of training on four ranks

`weft-lab COMMAND --help` explains a command with examples.
Exit codes: 0 good, 1 a check failed or a run broke, 2 bad usage.)";

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Weft's laboratory: a small MoE model that trains over Weft, and exchanges of thousands of "
      "ranks."
  );
  app.name("weft-lab");
  app.footer(kFooter);
  app.require_subcommand(1);
  weft::program::add_train(app);
  weft::program::add_simulate(app);
  return weft::program::run_program(app, argc, argv);
}
