// SPDX-License-Identifier: Apache-2.0
// The sizes in which pools hold memory, so that a buffer that is given back fits the next request.
#pragma once

#include <bit>
#include <cstdint>

namespace weft {

// Returns `bytes` rounded up to 1, 1.25, 1.5 or 1.75 times a power of two, at least 64 KiB.
[[nodiscard]] constexpr uint64_t size_class(uint64_t bytes) {
  constexpr uint64_t kSmallest = 64 << 10;
  if (bytes <= kSmallest) {
    return kSmallest;
  }
  const uint64_t quarter = std::bit_ceil(bytes) / 8;
  return (bytes + quarter - 1) / quarter * quarter;
}

}  // namespace weft
