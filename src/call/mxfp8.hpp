// SPDX-License-Identifier: Apache-2.0
// MXFP8, for host and device: Quantise::kMxfp8 in the words of include/weft/calls.hpp. Its scales
// are rounded up, so that no finite element saturates.
#pragma once

#include "call/block_scale.hpp"
#include "call/quantise.hpp"

namespace weft {

// Returns the scale of a group whose larger_magnitude() is `largest`.
WEFT_HD constexpr BlockScale mxfp8_scale(float largest) {
  const uint8_t exponent = e8m0_above(largest / largest_fp8(Quantise::kMxfp8));
  return {exponent, e8m0_inverse(exponent)};
}

}  // namespace weft
