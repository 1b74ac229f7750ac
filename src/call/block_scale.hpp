// SPDX-License-Identifier: Apache-2.0
// Code shared by formats with a one-byte scale for each small group, for host and device: the
// largest magnitude of a group, and powers of two in a byte (E8M0). mxfp8.hpp and nvfp4.hpp use it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// A group's scale.
struct BlockScale {
  uint8_t stored;
  float factor;  // by which elements are multiplied before they are rounded
};

// Returns a * b rounded, not fused with a sum that follows, which would give other bits.
WEFT_HD inline float product_of(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Returns the larger of |b| and the magnitude `a`; a NaN is larger than any number.
WEFT_HD constexpr float larger_magnitude(float a, float b) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(b) & 0x7fffffffU;
  return std::bit_cast<float>(std::max(std::bit_cast<uint32_t>(a), magnitude));
}

// Returns the exponent + 127 of the least power of two from 2^-127 to 2^127 not below `value`,
// which is not negative; that of 2^127 for infinity, 255 for a NaN.
WEFT_HD constexpr uint8_t e8m0_above(float value) {
  constexpr int kMantissaBits = 23;
  constexpr uint32_t kLeast = 1U << (kMantissaBits - 1);  // 2^-127, which is below normal numbers
  constexpr uint32_t kInfinity = 0xffU << kMantissaBits;
  const auto bits = std::bit_cast<uint32_t>(value);
  if (bits <= kLeast) {
    return 0;
  }
  if (bits > kInfinity) {
    return 0xff;
  }
  const uint32_t above = (bits + (1U << kMantissaBits) - 1) >> kMantissaBits;
  return static_cast<uint8_t>(std::min<uint32_t>(above, 0xfe));
}

// Returns one over the power of two that `exponent` stands for; a NaN for 255.
WEFT_HD constexpr float e8m0_inverse(uint8_t exponent) {
  constexpr int kMantissaBits = 23;
  if (exponent >= 0xfe) {
    return std::bit_cast<float>(exponent == 0xff ? 0x7fc00000U : 1U << (kMantissaBits - 1));
  }
  return std::bit_cast<float>((0xfeU - exponent) << kMantissaBits);
}

}  // namespace weft
