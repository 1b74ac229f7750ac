// SPDX-License-Identifier: Apache-2.0
// How rows of scales lie in staging, for host and device.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// Bytes from one staged scale row to the next.
WEFT_HD constexpr int64_t staged_scale_bytes(int64_t scale_bytes) {
  return (scale_bytes + 15) / 16 * 16;
}

}  // namespace weft
