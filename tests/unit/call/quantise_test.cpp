// SPDX-License-Identifier: Apache-2.0
// Scales of groups by every rule, with numbers that show where the rules part.
#include "call/quantise.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "call/mxfp8.hpp"
#include "call/nvfp4.hpp"
#include "call/scale_layout.hpp"
#include "core/fp8.hpp"
#include "core/half.hpp"
#include "support/fp8.hpp"

namespace weft {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::nanf("");  // NOLINT(cert-err58-cpp): it throws nothing

// Returns the magnitude of these bits; bits count up by magnitude, infinity and a NaN last.
float magnitude(uint32_t bf16) {
  return bf16_to_float(static_cast<uint16_t>(bf16));
}

TEST(ScaleTest, IsTheLargestMagnitudeTimesOneOverTheLargestNumber) {
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    const float last = largest_fp8(kind);
    const float one_over_last = 1 / last;
    for (const ScaleRule rule : {ScaleRule::kExact, ScaleRule::kClamped}) {
      for (uint32_t mantissa = 128; mantissa < 256; ++mantissa) {
        const auto largest = static_cast<float>(mantissa);
        const Fp8Scale scale = fp8_scale(largest, kind, rule);
        ASSERT_EQ(scale.stored, largest * one_over_last) << largest;
        ASSERT_EQ(scale.factor, last / largest) << largest;
      }
    }
  }
  EXPECT_EQ(fp8_scale(1e-30F, Quantise::kE4M3, ScaleRule::kExact).stored, 1e-30F * (1 / 448.0F));
  EXPECT_EQ(fp8_scale(0, Quantise::kE4M3, ScaleRule::kExact).stored, 1.0F);
}

TEST(ScaleTest, IsNormalAndSoIsTheFactorForEveryGroupOfNumbers) {
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    for (const ScaleRule rule :
         {ScaleRule::kExact, ScaleRule::kClamped, ScaleRule::kPowerOfTwo, ScaleRule::kUe8m0}) {
      for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
        const Fp8Scale scale = fp8_scale(magnitude(bits), kind, rule);
        ASSERT_TRUE(std::isnormal(scale.stored)) << magnitude(bits);
        ASSERT_TRUE(std::isnormal(scale.factor)) << magnitude(bits);
        ASSERT_LE(magnitude(bits) * scale.factor, largest_fp8(kind) * (1 + 0x1p-22F));
      }
    }
  }
}

TEST(ScaleTest, IsClampedBelowTenThousandth) {
  const auto scale = [](float largest) {
    return fp8_scale(largest, Quantise::kE4M3, ScaleRule::kClamped).stored;
  };
  EXPECT_EQ(scale(3), 3 * (1 / 448.0F));
  EXPECT_EQ(scale(1e-4F), 1e-4F * (1 / 448.0F));
  EXPECT_EQ(scale(std::nextafterf(1e-4F, 1)), std::nextafterf(1e-4F, 1) * (1 / 448.0F));
  EXPECT_EQ(scale(1e-5F), scale(1e-4F));
  EXPECT_EQ(scale(0), scale(1e-4F));
  EXPECT_EQ(fp8_scale(0, Quantise::kE5M2, ScaleRule::kClamped).stored, 1e-4F * (1 / 57344.0F));
}

TEST(ScaleTest, IsRoundedUpToAPowerOfTwo) {
  const auto power = [](float largest, Quantise kind) {
    const Fp8Scale scale = fp8_scale(largest, kind, ScaleRule::kPowerOfTwo);
    EXPECT_EQ(scale.stored * scale.factor, 1);
    return scale.stored;
  };
  for (const Quantise kind : {Quantise::kE4M3, Quantise::kE5M2}) {
    const auto scale = [&](float largest) { return power(largest, kind); };
    const float last = largest_fp8(kind);
    EXPECT_EQ(scale(last), 1.0F);
    EXPECT_EQ(scale(last / 2), 0.5F);
    EXPECT_EQ(scale(last * 0.99F), 1.0F);
    EXPECT_EQ(scale(last * 1.01F), 2.0F);
    EXPECT_EQ(scale(last * 0.625F), 1.0F);
    EXPECT_EQ(scale(0), scale(1e-4F));
  }
  EXPECT_EQ(power(0, Quantise::kE4M3), 0x1p-22F);  // 2.2e-7 is above
  EXPECT_EQ(power(0, Quantise::kE5M2), 0x1p-29F);  // 1.7e-9 is above
}

TEST(ScaleTest, IsAPowerOfTwoBeforeUe8m0StoresItsExponent) {
  const float most = std::numeric_limits<float>::max();
  for (const float largest : {0.0F, 1e-5F, 3.0F, 448.0F, 450.0F, most}) {
    const float scale = fp8_scale(largest, Quantise::kE4M3, ScaleRule::kUe8m0).stored;
    EXPECT_EQ(scale, fp8_scale(largest, Quantise::kE4M3, ScaleRule::kPowerOfTwo).stored);
    EXPECT_EQ(std::ldexp(1.0F, ue8m0_of(scale) - 127), scale);
  }
  EXPECT_EQ(ue8m0_of(1), 127);
  EXPECT_EQ(ue8m0_of(0.5F), 126);
  EXPECT_EQ(ue8m0_of(0x1p-22F), 105);
}

TEST(ScaleTest, TakesABytePerUe8m0AndFourElse) {
  const auto bytes = [](ScaleRule rule) {
    return stored_format(Quantise::kE4M3, rule).scale_bytes;
  };
  EXPECT_EQ(bytes(ScaleRule::kUe8m0), 1);
  EXPECT_EQ(bytes(ScaleRule::kExact), 4);
  EXPECT_EQ(bytes(ScaleRule::kClamped), 4);
  EXPECT_EQ(bytes(ScaleRule::kPowerOfTwo), 4);
}

TEST(BlockScaleTest, FindsTheLargestMagnitudeOrNaN) {
  EXPECT_EQ(larger_magnitude(1, -2), 2.0F);
  EXPECT_EQ(larger_magnitude(2, -1), 2.0F);
  EXPECT_EQ(larger_magnitude(0, -0.0F), 0.0F);
  EXPECT_EQ(larger_magnitude(5, -kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(larger_magnitude(kInfinity, kNaN)));
  EXPECT_TRUE(std::isnan(larger_magnitude(kInfinity, -kNaN)));
  EXPECT_TRUE(std::isnan(larger_magnitude(kNaN, 1)));
}

TEST(BlockScaleTest, FindsThePowerOfTwoAboveAndItsInverse) {
  for (int code = 0; code < 255; ++code) {
    const float power = std::ldexp(1.0F, code - 127);
    EXPECT_EQ(e8m0_above(power), code);
    EXPECT_EQ(e8m0_above(std::nextafterf(power, kInfinity)), std::min(code + 1, 254));
    EXPECT_EQ(e8m0_inverse(static_cast<uint8_t>(code)), std::ldexp(1.0F, 127 - code));
  }
  EXPECT_EQ(e8m0_above(0), 0);
  EXPECT_EQ(e8m0_above(kInfinity), 254);
  EXPECT_EQ(e8m0_above(kNaN), 255);
  EXPECT_TRUE(std::isnan(e8m0_inverse(255)));
}

TEST(Mxfp8Test, NeverSaturatesWhatIsFinite) {
  for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float largest = magnitude(bits);
    const BlockScale scale = mxfp8_scale(largest);
    ASSERT_EQ(scale.stored, test::e8m0_not_below(static_cast<double>(largest) / 448)) << largest;
    ASSERT_EQ(scale.factor, std::ldexp(1.0F, 127 - scale.stored)) << largest;
    ASSERT_LE(largest * scale.factor, 448) << largest;
  }
  EXPECT_EQ(mxfp8_scale(0).stored, 0);
  EXPECT_EQ(mxfp8_scale(kInfinity).stored, 254);
  EXPECT_EQ(float_to_fp8(kInfinity * mxfp8_scale(kInfinity).factor, kFp8E4M3), 0x7e);
  EXPECT_EQ(mxfp8_scale(kNaN).stored, 255);
  EXPECT_EQ(float_to_fp8(3 * mxfp8_scale(kNaN).factor, kFp8E4M3), 0x7f);
}

TEST(Nvfp4Test, ScalesGroupsByTheGlobalScaleInE4M3) {
  for (const float global_scale : {1.0F, 448 * 6 / 3.25F, 0x1p-9F}) {
    for (uint32_t bits = 0; bits < 0x7f80; ++bits) {
      const float largest = magnitude(bits);
      const BlockScale scale = nvfp4_scale(largest, global_scale, ScaleRule::kExact);
      const uint8_t code = test::nearest_fp8(global_scale * (largest / 6), Quantise::kE4M3);
      const float stored = test::fp8_to_float(code, Quantise::kE4M3);
      ASSERT_EQ(scale.stored, code) << largest;
      ASSERT_EQ(scale.factor, code == 0 ? 0.0F : global_scale / stored) << largest;
    }
  }
  const BlockScale endless = nvfp4_scale(kInfinity, 2, ScaleRule::kExact);
  EXPECT_EQ(endless.stored, 0x7e);
  EXPECT_EQ(float_to_fp4(-kInfinity * endless.factor), 0xf);
  const BlockScale none = nvfp4_scale(kNaN, 2, ScaleRule::kExact);
  EXPECT_EQ(none.stored, 0x7f);
  EXPECT_EQ(float_to_fp4(-3 * none.factor), 7);
}

TEST(Nvfp4Test, ScalesGroupsByPowersOfTwo) {
  const auto stored = [](float largest) {
    return nvfp4_scale(largest, 2, ScaleRule::kUe8m0).stored;
  };
  EXPECT_EQ(stored(3), 127);
  EXPECT_EQ(stored(3.25F), 128);
  EXPECT_EQ(stored(0), 0);
  EXPECT_EQ(stored(kInfinity), 254);
  EXPECT_EQ(stored(kNaN), 255);
  EXPECT_EQ(nvfp4_scale(3.25F, 2, ScaleRule::kUe8m0).factor, 1.0F);
  EXPECT_EQ(nvfp4_scale(0, 448, ScaleRule::kUe8m0).factor, 0.0F);
  // A zero among numbers as small as there are stays one.
  const BlockScale least = nvfp4_scale(0x1p-133F, 448, ScaleRule::kUe8m0);
  EXPECT_EQ(least.stored, 1);
  EXPECT_EQ(float_to_fp4(0 * least.factor), 0);
}

TEST(Fp4Test, RoundsToNearestEvenAtEveryBoundary) {
  for (size_t code = 0; code < test::kFp4Numbers.size(); ++code) {
    const float low = test::kFp4Numbers[code];
    const float high = code + 1 < test::kFp4Numbers.size() ? test::kFp4Numbers[code + 1] : 8;
    const float middle = (low + high) / 2;
    for (const float value : {low, middle, high}) {
      for (const float near :
           {value, std::nextafterf(value, kInfinity), std::nextafterf(value, -1)}) {
        EXPECT_EQ(float_to_fp4(near), test::nearest_fp4(near)) << near;
        EXPECT_EQ(float_to_fp4(-near), test::nearest_fp4(-near)) << -near;
      }
    }
  }
  for (uint32_t bits = 0; bits <= 0x7f80; ++bits) {
    ASSERT_EQ(float_to_fp4(magnitude(bits)), test::nearest_fp4(magnitude(bits)));
  }
  EXPECT_EQ(float_to_fp4(kNaN), 7);
  EXPECT_EQ(float_to_fp4(-kNaN), 7);
}

TEST(ScaleLayoutTest, HasAPlaceOfItsOwnForEachWord) {
  constexpr int32_t kStride = 150;
  constexpr int32_t kRows = 3 * kStride;
  constexpr int64_t kRowBytes = 12;
  for (const ScaleLayout layout :
       {ScaleLayout::kByRow, ScaleLayout::kByColumn, ScaleLayout::kInTiles}) {
    const int64_t num_rows = num_scale_rows(layout, kRows, kStride);
    EXPECT_EQ(num_rows, layout == ScaleLayout::kInTiles ? 3 * 256 : kRows);
    std::set<int64_t> places;
    for (int32_t row = 0; row < kRows; ++row) {
      const ScaleWords words = scale_words(layout, kRowBytes, kStride, row);
      for (int64_t at = words.first; at < words.first + 3 * words.step; at += words.step) {
        places.insert(at);
      }
    }
    EXPECT_EQ(places.size(), kRows * 3);
    EXPECT_EQ(*places.begin(), 0);
    EXPECT_LT(*places.rbegin(), num_rows * kRowBytes);
  }
}

TEST(ScaleLayoutTest, PutsRowsOfATileInFourColumns) {
  const auto first = [](int32_t row) {
    return scale_words(ScaleLayout::kInTiles, 8, 150, row).first;
  };
  EXPECT_EQ(first(1), 16);
  EXPECT_EQ(first(32), 4);
  EXPECT_EQ(first(127), 31 * 16 + 12);
  EXPECT_EQ(first(128), 1024);  // the second tile of two words
  EXPECT_EQ(first(150), 2048);  // the next block
  EXPECT_EQ(scale_words(ScaleLayout::kInTiles, 8, 150, 0).step, 512);
}

}  // namespace
}  // namespace weft
