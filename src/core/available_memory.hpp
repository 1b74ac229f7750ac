// SPDX-License-Identifier: Apache-2.0
// How much memory this process can still get. Asking for more would wake the kernel's killer before
// any call fails.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

inline constexpr uint64_t kUnknownBytes = UINT64_MAX;

struct MemoryBounds {
  uint64_t limit = kUnknownBytes;      // of this process's control groups, versions 1 and 2
  uint64_t available = kUnknownBytes;  // what they and the system have left
};

// Returns the bounds; what cannot be read bounds nothing. `root` stands before /proc and /sys.
[[nodiscard]] MemoryBounds memory_bounds(const std::string& root = "");

// Throws Error (kOutOfMemory), naming what is available, if `bytes` for `what` are more.
void check_available(uint64_t bytes, std::string_view what);

}  // namespace weft
