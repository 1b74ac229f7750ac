// SPDX-License-Identifier: Apache-2.0
// Runs a command's body on several ranks: forked processes, threads, or the processes that
// torchrun, mpirun or srun started.
#pragma once

#include <functional>
#include <string>

#include "cli/forward.hpp"
#include "weft/group.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

struct RankOptions {
  int num_ranks = 4;
  bool use_threads = false;
  std::string command;  // who speaks in errors
};

// Adds --ranks N, --processes and --threads.
void add_rank_options(CLI::App& command, RankOptions& options);

// Returns after all ranks have ended. If any threw, died or returned other than 0, says why on
// stderr, one line per distinct reason, and throws CLI::RuntimeError(1). Call before starting
// threads.
void run_ranks(const RankOptions& options, const std::function<int(Group&)>& body);

// Adds --transport; a name that no transport has is bad usage.
void add_transport_option(CLI::App& command, std::string& name);

// Returns what rank 0 of so many forked processes answers, or that they did not. Asks what this
// process must not try, such as to use CUDA before it forks ranks that do. Call before starting
// threads.
[[nodiscard]] std::string ask_processes(
    int num_ranks, const std::function<std::string(Group&)>& question
);

// --device, for every command that can use GPUs: which executor, how many ranks, and which GPU is a
// rank's.
struct DeviceChoice {
  std::string wanted = "auto";  // auto: GPUs if there are any
  int num_gpus = 0;             // set by choose_device(); 0: on the CPU

  [[nodiscard]] bool is_on_gpu() const { return num_gpus > 0; }
  // Ranks take the GPUs in turn.
  [[nodiscard]] Device device(int rank) const;
};

// Adds --device auto|cpu|cuda.
void add_device_option(CLI::App& command, DeviceChoice& choice);

// Finds the GPUs if they are wanted. CUDA stays untouched in this process, which may fork the
// ranks. A `transport` of the CPU decides for it. Throws Error (kNotAvailable) if GPUs are asked
// for and there is none.
void choose_device(DeviceChoice& choice, const std::string& transport = "auto");

// For commands whose one process drives all GPUs: the ranks are threads, one on each GPU unless
// --ranks says otherwise.
void take_all_gpus(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks);

// On GPUs, unless --ranks says otherwise: a rank on each, or four on a single one.
void choose_ranks(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks);
// Returns `ranks` with another number of ranks: threads where several share a GPU, since processes
// would wait for each other's time slices.
[[nodiscard]] RankOptions with_ranks(
    const RankOptions& ranks, const DeviceChoice& choice, int num_ranks
);

}  // namespace weft::program
