// SPDX-License-Identifier: Apache-2.0
// fp32 <-> FP8, round to nearest even, only by integer arithmetic: the same bits on every machine.
// A number that is too large becomes the largest of its sign, a NaN 0x7f.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/hd.hpp"

namespace weft {

struct Fp8Format {
  int mantissa_bits;
  int bias;        // of the exponent
  uint8_t finite;  // the bits of the largest number
};
inline constexpr Fp8Format kFp8E4M3 = {.mantissa_bits = 3, .bias = 7, .finite = 0x7e};   // 448
inline constexpr Fp8Format kFp8E5M2 = {.mantissa_bits = 2, .bias = 15, .finite = 0x7b};  // 57344

WEFT_HD constexpr uint8_t float_to_fp8(float value, Fp8Format format) {
  constexpr int kMantissaBits = 23;  // of fp32
  constexpr int kBias = 127;
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return 0x7f;
  }
  const auto exponent_at = [&](int exponent) {
    return static_cast<uint32_t>(exponent + kBias) << kMantissaBits;
  };
  if (magnitude < exponent_at(1 - format.bias)) {
    // Below the smallest normal number: the addition of one whose last bit counts as the last bit
    // of the result does the rounding.
    const uint32_t anchor = exponent_at(1 - format.bias - format.mantissa_bits + kMantissaBits);
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(anchor);
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - anchor));
  }
  const int shift = kMantissaBits - format.mantissa_bits;
  const uint32_t half_less_one = (1U << (shift - 1)) - 1;
  const uint32_t rounded =
      magnitude - exponent_at(-format.bias) + half_less_one + (magnitude >> shift & 1U);
  return static_cast<uint8_t>(sign | std::min<uint32_t>(rounded >> shift, format.finite));
}

// Returns the number of a code: a finite one of kFp8E4M3 or kFp8E5M2, or 0x7f, which is a NaN.
WEFT_HD constexpr float fp8_to_float(uint8_t code, Fp8Format format) {
  constexpr int kMantissaBits = 23;  // of fp32
  constexpr uint32_t kBias = 127;
  if ((code & 0x7f) > format.finite) {
    return std::bit_cast<float>(0x7fc00000U);
  }
  const auto magnitude = static_cast<uint32_t>(code & 0x7f)
                         << (kMantissaBits - format.mantissa_bits);
  // The product with a power of two re-biases the exponent and normalises what is subnormal.
  const auto power = (2 * kBias - static_cast<uint32_t>(format.bias)) << kMantissaBits;
  const float value = std::bit_cast<float>(magnitude) * std::bit_cast<float>(power);
  return (code & 0x80) != 0 ? -value : value;
}

}  // namespace weft
