// SPDX-License-Identifier: Apache-2.0
// A model of this machine, by measuring what it can show of itself.
#pragma once

#include <string>

#include "simulate/model.hpp"

namespace weft::program {

// Copies, plans, messages over shared memory and over loopback; what needs a network stays as
// assumed. Writes the model to `path` and returns it. Throws Error (kFile).
[[nodiscard]] sim::Model calibrate(const std::string& path);

}  // namespace weft::program
