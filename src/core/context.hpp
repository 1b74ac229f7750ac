// SPDX-License-Identifier: Apache-2.0
// Who is speaking, and the one function that throws. This is not in check.hpp because nvcc does not
// compile fmt.
#pragma once

#include <string>
#include <string_view>

#include "weft/error.hpp"

namespace weft {

// Who is speaking; appended to every message as "[rank 2/8, shm]".
struct Context {
  int rank = -1;  // -1: no group involved, nothing is appended
  int num_ranks = 0;
  std::string_view transport = {};
};

// Throws TimeoutError or PeerError for their codes, Error otherwise. The last two stand for the
// caller's place (clang 14 has no std::source_location).
[[noreturn]] void raise_error(
    ErrorCode code,
    const Context& context,
    const std::string& problem,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()
);

}  // namespace weft
