// SPDX-License-Identifier: Apache-2.0
// Runs a command's body on several ranks: forked processes, threads, or the processes that
// torchrun, mpirun or srun started.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>
#include <string>

#include "weft/group.hpp"

namespace weft::program {

struct RankOptions {
  int num_ranks = 4;
  bool use_threads = false;
  std::string command;  // who speaks in errors
};

// Adds --ranks N, --processes and --threads.
void add_rank_options(CLI::App& command, RankOptions& options);

// True if a launcher started this process as one of several ranks.
[[nodiscard]] bool is_launched();

// Returns after all ranks have ended. If any threw, died or returned other than 0, says why on
// stderr, one line per distinct reason, and throws CLI::RuntimeError(1). Call before starting
// threads.
void run_ranks(const RankOptions& options, const std::function<int(Group&)>& body);

}  // namespace weft::program
