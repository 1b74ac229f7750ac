// SPDX-License-Identifier: Apache-2.0
// How dispatch makes FP8 of bf16 rows, for host and device: a group has a scale by a ScaleRule; an
// element is divided by it and rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

WEFT_HD constexpr float largest_fp8(Quantise kind) {
  return kind == Quantise::kE4M3 ? 448.0F : 57344.0F;
}

// The bytes of a scale as it is stored.
WEFT_HD constexpr int scale_bytes(ScaleRule rule) {
  return rule == ScaleRule::kUe8m0 ? 1 : 4;
}

// largest: of the magnitudes in a group.
WEFT_HD constexpr float scale_of(float largest, Quantise kind, ScaleRule rule) {
  if (rule == ScaleRule::kExact) {
    return largest == 0.0F ? 1.0F : largest / largest_fp8(kind);
  }
  const float scale = (largest < 1e-4F ? 1e-4F : largest) / largest_fp8(kind);
  if (rule == ScaleRule::kClamped) {
    return scale;
  }
  // It is positive and normal: any bit of the mantissa carries into the exponent.
  constexpr uint32_t kMantissa = (1U << 23) - 1;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + kMantissa) & ~kMantissa);
}

// A power of two as ScaleRule::kUe8m0 stores it.
WEFT_HD constexpr uint8_t ue8m0_of(float scale) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
}

}  // namespace weft
