// SPDX-License-Identifier: Apache-2.0
// Floats around every rounding boundary of FP8 and every bf16 number, against a search through all
// numbers of the format.
#include "core/fp8.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/half.hpp"
#include "support/fp8.hpp"

namespace weft {
namespace {

class Fp8Test : public testing::TestWithParam<Quantise> {
 protected:
  static void expect_nearest(float value) {
    const Fp8Format& format = GetParam() == Quantise::kE4M3 ? kFp8E4M3 : kFp8E5M2;
    for (const float each : {value, -value}) {
      if (HasFailure()) {
        return;  // one says enough
      }
      EXPECT_EQ(float_to_fp8(each, format), test::nearest_fp8(each, GetParam())) << each;
    }
  }
};

TEST_P(Fp8Test, RoundsToNearestEvenAtEveryBoundary) {
  for (int code = 0; code < test::num_finite_fp8(GetParam()); ++code) {
    const float low = test::fp8_to_float(code, GetParam());
    const float high = test::fp8_to_float(code + 1, GetParam());  // one above the last, too
    const float middle = (low + high) / 2;
    for (const float value : {low, middle, high}) {
      expect_nearest(value);
      expect_nearest(std::nextafterf(value, std::numeric_limits<float>::infinity()));
      expect_nearest(std::nextafterf(value, -1));
    }
  }
}

TEST_P(Fp8Test, TakesEveryBf16Number) {
  for (uint32_t bits = 0; bits <= 0x7f80; ++bits) {  // infinity is the last
    expect_nearest(bf16_to_float(static_cast<uint16_t>(bits)));
  }
}

TEST_P(Fp8Test, HasOneNaN) {
  const Fp8Format& format = GetParam() == Quantise::kE4M3 ? kFp8E4M3 : kFp8E5M2;
  for (const int bits : {0x7f81, 0x7fc0, 0xffc0, 0xffff}) {
    EXPECT_EQ(float_to_fp8(bf16_to_float(static_cast<uint16_t>(bits)), format), 0x7f);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Fp8Test, testing::Values(Quantise::kE4M3, Quantise::kE5M2));

}  // namespace
}  // namespace weft
