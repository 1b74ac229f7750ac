// SPDX-License-Identifier: Apache-2.0
// Every 16-bit pattern, and floats around every rounding boundary, against arithmetic in double
// that shares nothing with the code under test.
#include "core/half.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace weft {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A binary format by its definition.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] int top_exponent() const { return (1 << exponent_bits) - 1; }

  // Returns the value of a pattern without sign, which is not that of a NaN.
  [[nodiscard]] double value(int pattern) const {
    const int exponent = pattern >> mantissa_bits;
    const int mantissa = pattern & ((1 << mantissa_bits) - 1);
    if (exponent == top_exponent()) {
      return std::numeric_limits<double>::infinity();
    }
    const int hidden = exponent == 0 ? 0 : 1 << mantissa_bits;
    return std::ldexp(hidden + mantissa, std::max(exponent, 1) - bias() - mantissa_bits);
  }
  [[nodiscard]] int infinity() const { return top_exponent() << mantissa_bits; }
};

constexpr Format kBf16 = {8, 7};
constexpr Format kFp16 = {5, 10};

struct Half {
  Format format;
  std::function<float(uint16_t)> widen;
  std::function<uint16_t(float)> narrow;
};

const std::array<Half, 2>& halves() {
  static const std::array<Half, 2> kHalves = {
      Half{kBf16, bf16_to_float, float_to_bf16}, Half{kFp16, fp16_to_float, float_to_fp16}};
  return kHalves;
}

// Nearest pattern to a positive double, ties to even, by trying neighbours of a binary search.
uint16_t nearest(const Format& format, double magnitude) {
  int low = 0;
  int high = format.infinity();
  while (low < high) {  // first pattern that is not smaller
    const int middle = (low + high) / 2;
    if (format.value(middle) < magnitude) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || format.value(low) == magnitude) {
    return static_cast<uint16_t>(low);
  }
  // Past the largest number the next step of the scale stands for infinity.
  const double below = format.value(low - 1);
  const double above =
      low == format.infinity() ? 2 * below - format.value(low - 2) : format.value(low);
  const double middle = (below + above) / 2;
  if (magnitude == middle) {
    return static_cast<uint16_t>(low % 2 == 0 ? low : low - 1);
  }
  return static_cast<uint16_t>(magnitude < middle ? low - 1 : low);
}

TEST(HalfTest, WidensEveryPatternExactly) {
  for (const Half& half : halves()) {
    for (int pattern = 0; pattern <= half.format.infinity(); ++pattern) {
      const auto bits = static_cast<uint16_t>(pattern);
      const float value = half.widen(bits);
      ASSERT_EQ(static_cast<double>(value), half.format.value(pattern)) << pattern;
      ASSERT_FALSE(std::signbit(value)) << pattern;
      const float negative = half.widen(static_cast<uint16_t>(bits | 0x8000U));
      ASSERT_EQ(bits_of(negative), bits_of(value) | 0x80000000U) << pattern;
    }
  }
}

TEST(HalfTest, ReturnsEveryPatternFromItsFloat) {
  for (const Half& half : halves()) {
    for (int pattern = 0; pattern <= half.format.infinity(); ++pattern) {
      for (const int sign : {0, 0x8000}) {
        const auto bits = static_cast<uint16_t>(pattern | sign);
        ASSERT_EQ(half.narrow(half.widen(bits)), bits);
      }
    }
  }
}

TEST(HalfTest, KeepsNanWithItsSign) {
  for (const Half& half : halves()) {
    for (int pattern = half.format.infinity() + 1; pattern < 0x8000; ++pattern) {
      for (const uint32_t sign : {0U, 0x8000U}) {
        const float value =
            half.widen(static_cast<uint16_t>(static_cast<uint32_t>(pattern) | sign));
        ASSERT_TRUE(std::isnan(value)) << pattern;
        ASSERT_EQ(std::signbit(value), sign != 0) << pattern;
        const uint16_t back = half.narrow(value);
        ASSERT_GT(back & 0x7fff, half.format.infinity());
        ASSERT_EQ(back & 0x8000U, sign);
      }
    }
    for (const uint32_t bits : {0x7f800001U, 0x7fffffffU, 0xff800001U, 0xffc12345U}) {
      const uint16_t narrow = half.narrow(from_bits(bits));
      EXPECT_GT(narrow & 0x7fff, half.format.infinity()) << bits;
      EXPECT_EQ(narrow >> 15, bits >> 31) << bits;
    }
  }
}

// Each pattern, the middle to its neighbour, and the floats beside both: wherever rounding turns.
TEST(HalfTest, RoundsToNearestEvenAroundEveryBoundary) {
  for (const Half& half : halves()) {
    for (int pattern = 0; pattern < half.format.infinity(); ++pattern) {
      const double value = half.format.value(pattern);
      const double step = pattern + 1 == half.format.infinity()
                              ? value - half.format.value(pattern - 1)
                              : half.format.value(pattern + 1) - value;
      for (const double centre : {value, value + step / 2}) {
        const auto middle = static_cast<float>(centre);
        for (const float near :
             {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, INFINITY)}) {
          const uint16_t expected = nearest(half.format, static_cast<double>(near));
          ASSERT_EQ(half.narrow(near), expected) << "float bits " << bits_of(near);
          ASSERT_EQ(half.narrow(-near), expected | 0x8000) << "float bits " << bits_of(near);
        }
      }
    }
  }
}

TEST(HalfTest, RoundsFloatsOfEveryExponent) {
  uint32_t state = 12345;
  for (const Half& half : halves()) {
    for (uint32_t exponent = 0; exponent < 255; ++exponent) {
      for (int i = 0; i < 200; ++i) {
        state = state * 1664525U + 1013904223U;
        const float value = from_bits(exponent << 23 | state >> 9);
        ASSERT_EQ(half.narrow(value), nearest(half.format, static_cast<double>(value)))
            << "float bits " << bits_of(value);
      }
    }
  }
}

TEST(HalfTest, OverflowsToInfinityFromTheMiddleOfTheLastStep) {
  EXPECT_EQ(float_to_fp16(65519.99F), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_fp16(-1e30F), 0xfc00);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_bf16(-std::numeric_limits<float>::infinity()), 0xff80);
}

TEST(HalfTest, WorksInConstantExpressions) {
  static_assert(float_to_bf16(1.0F) == 0x3f80);
  static_assert(bf16_to_float(0xc000) == -2.0F);
  static_assert(float_to_fp16(1.0F) == 0x3c00);
  static_assert(fp16_to_float(0x0001) == 0x1p-24F);
  SUCCEED();
}

}  // namespace
}  // namespace weft
