// SPDX-License-Identifier: Apache-2.0
#include "commands.hpp"

#include <CLI/CLI.hpp>

#include <memory>
#include <string>
#include <vector>

#include "cli/program.hpp"

namespace weft::program {

// The subcommands, each in the file or folder of its name.
void add_info(CLI::App& app);
void add_check(CLI::App& app);
void add_limits(CLI::App& app);
void add_bench(CLI::App& app);
void add_plan(CLI::App& app);
void add_tune(CLI::App& app);

namespace {

// `weft` of the Python package comes before this program and has these two commands.
void add_run(CLI::App& app) {
  auto* run = app.add_subcommand(
      "run", "A program written for deep_ep or uccl, over Weft (of the Python package)"
  );
  auto option = std::make_shared<std::string>();
  auto words = std::make_shared<std::vector<std::string>>();
  run->add_option("--as", *option, "Names that Weft stands for: deep_ep,uccl");
  run->add_option("--json", *option, "Write what each process told here");
  run->add_option("--html", *option, "Write a page of who waited for whom here");
  run->add_option("command", *words, "-- and what to run");
  run->callback([option, words] {
    throw CLI::ValidationError("run", "is of the Python package: python -m weft run -- COMMAND");
  });
}

void add_stats(CLI::App& app) {
  auto* stats =
      app.add_subcommand("stats", "Who waited for whom, as a page (of the Python package)");
  auto option = std::make_shared<std::string>();
  auto words = std::make_shared<std::vector<std::string>>();
  stats->add_option("--html", *option, "Write a page of who waited for whom here");
  stats->add_option("files", *words, "Of weft run --json or weft.stats()");
  stats->callback([option, words] {
    throw CLI::ValidationError("stats", "is of the Python package: python -m weft stats FILE ...");
  });
}

constexpr const char* kFooter = R"(Start here:
  weft info                       what this build and this machine can do

`weft COMMAND --help` explains a command with examples.
Exit codes: 0 good, 1 a check failed or a run broke, 2 bad usage.)";

}  // namespace

int run_weft(int argc, char** argv) {
  CLI::App app("Weft carries Mixture-of-Experts tokens across ranks to their experts and back.");
  app.name("weft");
  app.footer(kFooter);
  app.require_subcommand(1);
  add_info(app);
  add_check(app);
  add_limits(app);
  add_bench(app);
  add_plan(app);
  add_tune(app);
  add_run(app);
  add_stats(app);
  return run_program(app, argc, argv);
}

}  // namespace weft::program
