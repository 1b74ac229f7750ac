// SPDX-License-Identifier: Apache-2.0
// From the environment's variables and secret files to a rendezvous. docs/launch.md tells the same
// to people.
#pragma once

#include <string>

#include "core/env.hpp"
#include "weft/group.hpp"

namespace weft {

// The first of these that is set decides: WEFT_RANK and WEFT_NUM_RANKS, torchrun, mpirun, srun. One
// rank alone (also when nothing is set) needs neither port nor secret, and gets none. Throws Error
// (kInvalidArgument) naming the variable that is missing or wrong.
[[nodiscard]] Rendezvous rendezvous_from(const Env& env);

// The number of ranks in it, without looking for port and secret.
[[nodiscard]] int launched_ranks(const Env& env);

inline constexpr size_t kMinSecretBytes = 16;

// The file's text without the line end. Throws Error (kFile) naming the file: missing, another
// user's, or open to other users.
[[nodiscard]] std::string read_secret_file(const std::string& path);

// A random secret of this user and host, made at first use in $XDG_RUNTIME_DIR/weft or
// ~/.config/weft. Ranks that start together agree on one. Throws Error (kFile).
[[nodiscard]] std::string user_secret(const Env& env);

}  // namespace weft
