// SPDX-License-Identifier: Apache-2.0
// --device, for every command that can use GPUs: which executor, how many ranks, and which GPU is a
// rank's. CUDA stays untouched in this process, which may fork the ranks.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "ranks.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

struct DeviceChoice {
  std::string wanted = "auto";  // auto: GPUs if there are any
  int num_gpus = 0;             // set by choose_device(); 0: on the CPU

  [[nodiscard]] bool is_on_gpu() const { return num_gpus > 0; }
  // Ranks take the GPUs in turn.
  [[nodiscard]] Device device(int rank) const;
};

// Adds --device auto|cpu|cuda.
void add_device_option(CLI::App& command, DeviceChoice& choice);

// Finds the GPUs if they are wanted. A `transport` of the CPU decides for it. Throws Error
// (kNotAvailable) if GPUs are asked for and there is none.
void choose_device(DeviceChoice& choice, const std::string& transport = "auto");

// On GPUs, unless --ranks says otherwise: a rank on each, or four on a single one.
void choose_ranks(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks);
// The same for a number of ranks: threads where several share a GPU, since processes would wait for
// each other's time slices.
[[nodiscard]] RankOptions with_ranks(
    const RankOptions& ranks, const DeviceChoice& choice, int num_ranks
);

}  // namespace weft::program
