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

[[nodiscard]] inline const std::array<double, 0x7f>& fp8_numbers(Quantise kind) {
  const auto all_of = [](Quantise which) {
    std::array<double, 0x7f> numbers = {};
    for (int code = 0; code < num_finite_fp8(which); ++code) {
      numbers[static_cast<size_t>(code)] = fp8_to_float(code, which);
    }
    return numbers;
  };
  static const auto e4m3 = all_of(Quantise::kE4M3);
  static const auto e5m2 = all_of(Quantise::kE5M2);
  return kind == Quantise::kE4M3 ? e4m3 : e5m2;
}

// The nearest finite number, the even code of two; what is beyond the last becomes the last. Not
// for NaN.
[[nodiscard]] inline uint8_t nearest_fp8(float value, Quantise kind) {
  const auto& numbers = fp8_numbers(kind);
  const auto num_finite = static_cast<size_t>(num_finite_fp8(kind));
  const double magnitude = std::min(std::fabs(static_cast<double>(value)), numbers[num_finite - 1]);
  size_t best = 0;
  double least = magnitude;
  for (size_t code = 1; code < num_finite; ++code) {
    const double distance = std::fabs(numbers[code] - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) {
      best = code;
      least = distance;
    }
  }
  return static_cast<uint8_t>((std::signbit(value) ? 0x80U : 0U) | best);
}

// Numbers of E2M1 by the three bits of their code; the sign is the bit above.
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
