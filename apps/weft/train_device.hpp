// SPDX-License-Identifier: Apache-2.0
// Which device `weft train` uses, and how its ranks must be started for it.
#pragma once

#include <CLI/CLI.hpp>

#include "train_options.hpp"

namespace weft::program {

// Adds --device and --dtype.
void add_device_options(CLI::App& command, TrainOptions& options);

// Turns `auto` into a device, and fills in what follows from it: bf16 on GPUs, and ranks as threads
// where there are more of them than GPUs, because processes take turns on one. `command` says what
// the user asked for in words. Touches no GPU, so that ranks may still be forked.
void settle_device(const CLI::App& command, TrainOptions& options);

// The GPU of one rank: they go round.
[[nodiscard]] Device device_of_rank(const TrainOptions& options, int rank);

}  // namespace weft::program
