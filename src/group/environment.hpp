// SPDX-License-Identifier: Apache-2.0
// Makes a rendezvous of the environment's variables and secret files. docs/launch.md tells the same
// to people.
#pragma once

#include <string>

#include "core/env.hpp"
#include "weft/group.hpp"

namespace weft {

// Returns the rendezvous by the first of these that is set: WEFT_RANK and WEFT_NUM_RANKS, torchrun,
// mpirun, srun. One rank alone (also when nothing is set) gets neither port nor secret. Throws
// Error (kInvalidArgument) naming the variable that is missing or wrong.
[[nodiscard]] Rendezvous rendezvous_from(const Env& env);

// Returns only the number of ranks, without looking for port and secret.
[[nodiscard]] int launched_ranks(const Env& env);

inline constexpr size_t kMinSecretBytes = 16;

// Returns the file's text without the line end. Throws Error (kFile) naming the file: missing,
// another user's, or open to other users.
[[nodiscard]] std::string read_secret_file(const std::string& path);

// Returns a random secret of this user and host, made at first use in $XDG_RUNTIME_DIR/weft or
// ~/.config/weft. Ranks that start together get the same one. Throws Error (kFile).
[[nodiscard]] std::string user_secret(const Env& env);

}  // namespace weft
