// SPDX-License-Identifier: Apache-2.0
// Which device `weft train` uses, and how its ranks must be started for it.
#pragma once

#include <CLI/CLI.hpp>

#include "train_options.hpp"

namespace weft::program {

// Adds --device and --dtype.
void add_train_device_options(CLI::App& command, TrainOptions& options);

// Settles the device and what follows from it: bf16 on GPUs, and ranks as threads where several
// share one. `command` knows what the user said in words. CUDA stays untouched in this process.
void choose_train_device(const CLI::App& command, TrainOptions& options);

}  // namespace weft::program
