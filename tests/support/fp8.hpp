// SPDX-License-Identifier: Apache-2.0
// FP8, FP4 and E8M0 by their definitions, slowly and sharing nothing with the code under test.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "weft/calls.hpp"

namespace weft::test {

// The finite numbers without sign: their codes count up from 0.
[[nodiscard]] inline int num_finite_fp8(Quantise kind) {
  return kind == Quantise::kE4M3 ? 0x7f : 0x7c;
}

[[nodiscard]] inline float fp8_to_float(int code, Quantise kind) {
  const int mantissa_bits = kind == Quantise::kE4M3 ? 3 : 2;
  const int bias = kind == Quantise::kE4M3 ? 7 : 15;
  const int exponent = code >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int hidden = exponent == 0 ? 0 : 1 << mantissa_bits;
  const int power = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
  return std::ldexp(static_cast<float>(hidden + mantissa), power);
}

// The nearest finite number, the even code of two; what is beyond the last becomes the last. Not
// for NaN.
[[nodiscard]] inline uint8_t nearest_fp8(float value, Quantise kind) {
  const double last = fp8_to_float(num_finite_fp8(kind) - 1, kind);
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), last);
  int best = 0;
  for (int code = 1; code < num_finite_fp8(kind); ++code) {
    const double distance = std::fabs(fp8_to_float(code, kind) - magnitude);
    const double least = std::fabs(fp8_to_float(best, kind) - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) {
      best = code;
    }
  }
  return static_cast<uint8_t>((std::signbit(value) ? 0x80 : 0) | best);
}

// The same of E2M1, whose sign is the bit above the three of its number.
inline constexpr std::array<float, 8> kFp4Numbers = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};

[[nodiscard]] inline uint8_t nearest_fp4(float value) {
  const float magnitude = std::min(std::fabs(value), kFp4Numbers.back());
  size_t best = 0;
  for (size_t code = 1; code < kFp4Numbers.size(); ++code) {
    const float distance = std::fabs(kFp4Numbers[code] - magnitude);
    const float least = std::fabs(kFp4Numbers[best] - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) {
      best = code;
    }
  }
  return static_cast<uint8_t>((std::signbit(value) ? 8 : 0) | best);
}

// The code of the least power of two that is not below `value`, of the largest if there is none.
[[nodiscard]] inline int e8m0_not_below(double value) {
  int code = 0;
  while (code < 254 && std::ldexp(1.0, code - 127) < value) {
    ++code;
  }
  return code;
}

}  // namespace weft::test
