// SPDX-License-Identifier: Apache-2.0
// Ranks that a launcher starts have each their own command line.
#pragma once

#include "train_options.hpp"
#include "weft/group.hpp"

namespace weft::program {

// Collective. Throws Error (kInvalidArgument) on every rank where options differ that decide what
// ranks say to each other between two steps; the model's are compared where it is made.
void agree_on_options(const Group& group, const TrainOptions& options);

}  // namespace weft::program
