// SPDX-License-Identifier: Apache-2.0
// NVFP4, for host and device: Quantise::kNvfp4 in the words of include/weft/calls.hpp.
#pragma once

#include <cstdint>
#include <limits>

#include "call/block_scale.hpp"
#include "call/quantise.hpp"
#include "core/fp8.hpp"

namespace weft {

inline constexpr float kLargestFp4 = 6;

WEFT_HD constexpr bool is_global_scale(float scale) {
  return scale > 0 && scale <= std::numeric_limits<float>::max();
}

// Returns the scale of a group whose larger_magnitude() is `largest`. A finite factor keeps zeros.
WEFT_HD inline BlockScale nvfp4_scale(float largest, float global_scale, ScaleRule rule) {
  constexpr float kMost = std::numeric_limits<float>::max();
  const bool is_power = rule == ScaleRule::kUe8m0;
  const float scale = product_of(global_scale, largest / kLargestFp4);
  const uint8_t stored = is_power ? e8m0_above(scale) : float_to_fp8(scale, kFp8E4M3);
  if (stored == 0) {
    return {0, 0};
  }
  const float factor = is_power ? product_of(global_scale, e8m0_inverse(stored))
                                : global_scale / fp8_to_float(stored, kFp8E4M3);
  return {stored, factor > kMost ? kMost : factor};
}

// Returns an E2M1 number in four bits; too large values become 6 of their sign, a NaN 6.
WEFT_HD constexpr uint8_t float_to_fp4(float value) {
  constexpr Fp8Format kFormat = {.mantissa_bits = 1, .bias = 1, .finite = 7};
  const uint8_t code = float_to_fp8(value, kFormat);
  return static_cast<uint8_t>((code >> 4 & 8) | (code & 7));
}

}  // namespace weft
