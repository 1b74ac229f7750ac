// SPDX-License-Identifier: Apache-2.0
// Scales of groups by every rule, with numbers that show where the rules part.
#include "call/quantise.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace weft {
namespace {

TEST(ScaleTest, IsExactlyWhatMakesTheLargestFit) {
  EXPECT_EQ(scale_of(448, Quantise::kE4M3, ScaleRule::kExact), 1.0F);
  EXPECT_EQ(scale_of(3, Quantise::kE4M3, ScaleRule::kExact), 3.0F / 448);
  EXPECT_EQ(scale_of(3, Quantise::kE5M2, ScaleRule::kExact), 3.0F / 57344);
  EXPECT_EQ(scale_of(1e-30F, Quantise::kE4M3, ScaleRule::kExact), 1e-30F / 448);
  EXPECT_EQ(scale_of(0, Quantise::kE4M3, ScaleRule::kExact), 1.0F);
}

TEST(ScaleTest, IsClampedBelowTenThousandth) {
  const auto scale = [](float largest) {
    return scale_of(largest, Quantise::kE4M3, ScaleRule::kClamped);
  };
  EXPECT_EQ(scale(3), 3.0F / 448);
  EXPECT_EQ(scale(1e-4F), 1e-4F / 448);
  EXPECT_EQ(scale(std::nextafterf(1e-4F, 1)), std::nextafterf(1e-4F, 1) / 448);
  EXPECT_EQ(scale(1e-5F), 1e-4F / 448);
  EXPECT_EQ(scale(0), 1e-4F / 448);
  EXPECT_EQ(scale_of(0, Quantise::kE5M2, ScaleRule::kClamped), 1e-4F / 57344);
}

TEST(ScaleTest, IsRoundedUpToAPowerOfTwo) {
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    const auto scale = [&](float largest) {
      return scale_of(largest, kind, ScaleRule::kPowerOfTwo);
    };
    const float last = largest_fp8(kind);
    EXPECT_EQ(scale(last), 1.0F);
    EXPECT_EQ(scale(std::nextafterf(last, 0)), 1.0F);
    EXPECT_EQ(scale(std::nextafterf(last, 2 * last)), 2.0F);
    EXPECT_EQ(scale(last / 2), 0.5F);
    EXPECT_EQ(scale(last * 0.625F), 1.0F);
    EXPECT_EQ(scale(0), scale(1e-4F));
  }
  EXPECT_EQ(scale_of(0, Quantise::kE4M3, ScaleRule::kPowerOfTwo), 0x1p-22F);  // 2.2e-7 is above
  EXPECT_EQ(scale_of(0, Quantise::kE5M2, ScaleRule::kPowerOfTwo), 0x1p-29F);  // 1.7e-9 is above
}

TEST(ScaleTest, IsAPowerOfTwoBeforeUe8m0StoresItsExponent) {
  const float most = std::numeric_limits<float>::max();
  for (const float largest : {0.0F, 1e-5F, 3.0F, 448.0F, 450.0F, most}) {
    const float scale = scale_of(largest, Quantise::kE4M3, ScaleRule::kUe8m0);
    EXPECT_EQ(scale, scale_of(largest, Quantise::kE4M3, ScaleRule::kPowerOfTwo));
    EXPECT_EQ(std::ldexp(1.0F, ue8m0_of(scale) - 127), scale);
  }
  EXPECT_EQ(ue8m0_of(1), 127);
  EXPECT_EQ(ue8m0_of(0.5F), 126);
  EXPECT_EQ(ue8m0_of(0x1p-22F), 105);
}

TEST(ScaleTest, TakesABytePerUe8m0AndFourElse) {
  EXPECT_EQ(scale_bytes(ScaleRule::kUe8m0), 1);
  EXPECT_EQ(scale_bytes(ScaleRule::kExact), 4);
  EXPECT_EQ(scale_bytes(ScaleRule::kClamped), 4);
  EXPECT_EQ(scale_bytes(ScaleRule::kPowerOfTwo), 4);
}

}  // namespace
}  // namespace weft
