// SPDX-License-Identifier: Apache-2.0
// Formats that dispatch makes of bf16 rows, for host and device: how rows of each lie, and how FP8
// gets its scales, one for a group by a ScaleRule; an element is multiplied by the scale's factor,
// rounded, and rounded to nearest even. mxfp8.hpp and nvfp4.hpp have the other formats.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.hpp"
#include "weft/calls.hpp"

namespace weft {

struct StoredFormat {
  int group;              // elements that share a scale
  int elements_per_byte;  // of a row
  int scale_bytes;        // of a scale
  int row_multiple;       // elements: whole groups in whole 16 bytes, which are moved at a time
};

WEFT_HD constexpr StoredFormat stored_format(Quantise kind, ScaleRule rule) {
  switch (kind) {
    case Quantise::kMxfp8:
      return {.group = 32, .elements_per_byte = 1, .scale_bytes = 1, .row_multiple = 32};
    case Quantise::kNvfp4:
      return {.group = 16, .elements_per_byte = 2, .scale_bytes = 1, .row_multiple = 32};
    default:
      return {
          .group = kQuantiseGroup,
          .elements_per_byte = 1,
          .scale_bytes = rule == ScaleRule::kUe8m0 ? 1 : 4,
          .row_multiple = kQuantiseGroup};
  }
}

constexpr bool has_scale_rule(Quantise kind, ScaleRule rule) {
  return rule == ScaleRule::kExact ||
         (kind == Quantise::kNvfp4 ? rule == ScaleRule::kUe8m0 : kind != Quantise::kMxfp8);
}

// Lower bound of a group's largest magnitude with ScaleRule::kExact, unless that is zero.
inline constexpr float kLeastExactMagnitude = 0x1p-110F;

WEFT_HD constexpr float largest_fp8(Quantise kind) {
  return kind == Quantise::kE5M2 ? 57344.0F : 448.0F;
}

// A group's scale of FP8.
struct Fp8Scale {
  float stored;
  float factor;  // by which elements are multiplied before they are rounded
};

// Returns the scale of a group of FP8 by its `largest` magnitude. Division by the scale would give
// other bits: the factor, rounded, is one over the scale before rounding. Both are finite and
// normal for every group of numbers.
WEFT_HD constexpr Fp8Scale fp8_scale(float largest, Quantise kind, ScaleRule rule) {
  if (rule == ScaleRule::kExact && largest == 0.0F) {
    return {1, 1};
  }
  const float last = largest_fp8(kind);
  const float one_over_last = kind == Quantise::kE5M2 ? 1 / 57344.0F : 1 / 448.0F;
  const float least = rule == ScaleRule::kExact ? kLeastExactMagnitude : 1e-4F;
  const float counted = largest < least ? least : largest;
  const float scale = counted * one_over_last;
  if (rule == ScaleRule::kExact || rule == ScaleRule::kClamped) {
    return {scale, last / counted};
  }
  // The scale is positive and normal: any bit of the mantissa carries into the exponent.
  constexpr uint32_t kMantissa = (1U << 23) - 1;
  const auto power =
      std::bit_cast<float>((std::bit_cast<uint32_t>(scale) + kMantissa) & ~kMantissa);
  return {power, 1 / power};
}

// A power of two as ScaleRule::kUe8m0 stores it.
WEFT_HD constexpr uint8_t ue8m0_of(float scale) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
}

}  // namespace weft
