// SPDX-License-Identifier: Apache-2.0
// From the environment's variables to a rendezvous. docs/launch.md tells the same to people.
#pragma once

#include "core/env.hpp"
#include "weft/group.hpp"

namespace weft {

// The first of these that is set decides: WEFT_RANK and WEFT_NUM_RANKS, torchrun, mpirun, srun. One
// rank alone (also when nothing is set) needs neither port nor secret, and gets none. Throws Error
// (kInvalidArgument) naming the variable that is missing or wrong.
[[nodiscard]] Rendezvous rendezvous_from(const Env& env);

// The number of ranks in it, without looking for port and secret.
[[nodiscard]] int launched_ranks(const Env& env);

}  // namespace weft
