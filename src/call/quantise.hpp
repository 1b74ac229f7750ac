// SPDX-License-Identifier: Apache-2.0
// What dispatch makes of bf16 rows, for host and device: how rows of each format lie, and how FP8
// gets its scales: a group has one by a ScaleRule; an element is divided by it and rounded to
// nearest even. mxfp8.hpp and nvfp4.hpp have the other formats.
#pragma once

#include <bit>
#include <cmath>
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

WEFT_HD constexpr float largest_fp8(Quantise kind) {
  return kind == Quantise::kE5M2 ? 57344.0F : 448.0F;
}

// largest: of the magnitudes in a group of FP8.
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

// Divides elements of bf16 by a scale of FP8, by products, of which a GPU executes fewer
// instructions than of `/`: the reciprocal is rounded correctly, and one correction makes the
// product the quotient, to the bit (a test has them all). A quotient near the ends of the range may
// differ, which is zero in every format of FP8 anyway; scales there are divided by.
class Divisor {
 public:
  WEFT_HD constexpr explicit Divisor(float scale) : scale_(scale), reciprocal_(1.0F / scale) {}

  // Whether product() is right for this scale.
  [[nodiscard]] WEFT_HD constexpr bool has_product() const {
    return scale_ >= 0x1p-70F && scale_ <= 0x1p70F;
  }
  [[nodiscard]] WEFT_HD float product(float value) const {
    const float near = value * reciprocal_;
    const float quotient = std::fma(std::fma(-near, scale_, value), reciprocal_, near);
    return std::copysign(quotient, value);
  }

 private:
  float scale_;
  float reciprocal_;
};

// A power of two as ScaleRule::kUe8m0 stores it.
WEFT_HD constexpr uint8_t ue8m0_of(float scale) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(scale) >> 23);
}

}  // namespace weft
