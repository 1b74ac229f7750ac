// SPDX-License-Identifier: Apache-2.0
// Where a secret comes from when it is not given as text.
#pragma once

#include <string>

#include "core/env.hpp"

namespace weft {

inline constexpr size_t kMinSecretBytes = 16;

// The file's text without the line end. Throws Error (kFile) naming the file: missing, another
// user's, or open to other users.
[[nodiscard]] std::string read_secret_file(const std::string& path);

// A random secret of this user and host, made at first use in $XDG_RUNTIME_DIR/weft or
// ~/.config/weft. Ranks that start together agree on one. Throws Error (kFile).
[[nodiscard]] std::string user_secret(const Env& env);

}  // namespace weft
