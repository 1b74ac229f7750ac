// SPDX-License-Identifier: Apache-2.0
// The codes of sums on their way: each is the nearest there is, errors are within their bounds, and
// the bytes lie where docs/wire.md says.
#include "call/wire.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "plan/random_routing.hpp"
#include "support/fp8.hpp"
#include "support/wire_bound.hpp"

namespace weft {
namespace {

using Group = std::array<float, kQuantiseGroup>;
constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr Wire kWires[] = {Wire::kFp8, Wire::kLogFmt10};

std::vector<std::byte> coded(Wire wire, const std::vector<Group>& groups) {
  const auto hidden = static_cast<int64_t>(groups.size()) * kQuantiseGroup;
  std::vector<std::byte> row(static_cast<size_t>(wire_row_bytes(wire, hidden)), std::byte{0xee});
  for (size_t group = 0; group < groups.size(); ++group) {
    code_group(wire, groups[group].data(), row.data(), hidden, static_cast<int64_t>(group));
  }
  return row;
}

Group read(Wire wire, const std::vector<std::byte>& row, int64_t num_groups, int64_t group) {
  Group values;
  read_group(wire, row.data(), num_groups * kQuantiseGroup, group, values.data());
  return values;
}

Group round_trip(Wire wire, const Group& group) {
  return read(wire, coded(wire, {group}), 1, 0);
}

float random_float(RandomSource& random, int64_t low, int64_t high) {
  const auto mantissa = static_cast<float>(random.between(-(1 << 24), 1 << 24));
  return std::ldexp(mantissa, static_cast<int>(random.between(low, high)) - 24);
}

// Groups of every kind: of one size and of many, of two values, with zeros, of subnormal numbers,
// and at either end of fp32.
std::vector<Group> many_groups() {
  RandomSource random(3);
  std::vector<Group> groups;
  struct Exponents {
    int64_t low;
    int64_t high;
  };
  for (const auto& [low, high] :
       {Exponents{0, 0},
        {-4, 4},
        {-40, 40},
        {-126, 127},
        {127, 127},
        {-126, -126},
        {-149, -100},
        {-149, -140},
        {-30, 2}}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      Group& group = groups.emplace_back();
      for (float& value : group) {
        value = repeat % 4 == 3 && random.below(3) == 0 ? 0 : random_float(random, low, high);
      }
    }
  }
  groups.emplace_back().fill(0);
  groups.emplace_back().fill(-3);
  groups.emplace_back().fill(std::numeric_limits<float>::max());
  groups.emplace_back().fill(std::numeric_limits<float>::denorm_min());
  groups.emplace_back().fill(0);
  groups.back()[5] = 1e-20F;
  groups.emplace_back().fill(std::numeric_limits<float>::denorm_min());
  groups.back()[9] = -std::numeric_limits<float>::max();
  return groups;
}

TEST(WireTest, ErrorsAreWithinTheirBounds) {
  for (const Wire wire : kWires) {
    for (const Group& group : many_groups()) {
      const std::vector<double> exact(group.begin(), group.end());
      const test::GroupRange range = test::range_of(exact);
      const Group values = round_trip(wire, group);
      for (size_t i = 0; i < group.size(); ++i) {
        const double bound = test::wire_bound(wire, exact[i], range);
        ASSERT_LE(std::fabs(values[i] - exact[i]), bound)
            << "wire " << static_cast<int>(wire) << ": " << group[i] << " became " << values[i];
        ASSERT_EQ(std::signbit(values[i]), std::signbit(group[i]));
      }
    }
  }
}

// Ten bits are no worse than a logarithm would be, by much: of numbers of ten powers of two 1% is
// the most.
TEST(WireTest, TenBitsOfTenPowersOfTwoAreExactToOnePercent) {
  RandomSource random(5);
  Group group;
  for (float& value : group) {
    value = std::exp2(static_cast<float>(random.between(0, 10000)) / 1000);
  }
  const Group values = round_trip(Wire::kLogFmt10, group);
  for (size_t i = 0; i < group.size(); ++i) {
    EXPECT_NEAR(values[i] / group[i], 1, 0.01);
  }
}

TEST(WireTest, Fp8IsTheNearestOfTheScale) {
  for (const Group& group : many_groups()) {
    float largest = 0;
    for (const float value : group) {
      largest = std::max(largest, std::fabs(value));
    }
    const float scale = largest == 0 ? 1 : std::max(largest / 448, 0x1p-126F);
    const std::vector<std::byte> row = coded(Wire::kFp8, {group});
    float head = 0;
    std::memcpy(&head, row.data() + kQuantiseGroup, sizeof head);
    EXPECT_EQ(head, scale);
    const Group values = read(Wire::kFp8, row, 1, 0);
    for (size_t i = 0; i < group.size(); ++i) {
      const uint8_t code = test::nearest_fp8(group[i] / scale, Quantise::kE4M3);
      EXPECT_EQ(std::to_integer<uint8_t>(row[i]), code);
      const float magnitude = test::fp8_to_float(code & 0x7f, Quantise::kE4M3);
      EXPECT_EQ(values[i], (code >= 0x80 ? -magnitude : magnitude) * scale);
    }
  }
}

// No other code's logarithm is nearer.
TEST(WireTest, TenBitsAreTheNearestCode) {
  for (const Group& values : many_groups()) {
    const std::vector<std::byte> row = coded(Wire::kLogFmt10, {values});
    uint32_t head = 0;
    std::memcpy(&head, row.data() + wire_heads(Wire::kLogFmt10, kQuantiseGroup), sizeof head);
    const LogGroup group(head);
    for (const float value : values) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(value) & kMagnitude;
      const uint32_t code = log_code(std::bit_cast<uint32_t>(value), group);
      EXPECT_EQ(code >> 9 != 0, std::signbit(value));
      if (magnitude == 0 || magnitude < group.least) {
        EXPECT_EQ(code & kLogCodes, 0U);
        continue;
      }
      const auto distance = [&](int64_t number) {
        return std::abs(int64_t{group.least} + (number - 1) * int64_t{group.step} - magnitude);
      };
      const int64_t number = code & kLogCodes;
      ASSERT_GE(number, 1);
      ASSERT_LE(distance(number), group.step / 2);
      if (number > 1) {
        EXPECT_LE(distance(number), distance(number - 1));
      }
      if (number < kLogCodes) {
        EXPECT_LE(distance(number), distance(number + 1));
      }
    }
  }
}

TEST(WireTest, WhatIsBelow32PowersOfTwoIsZero) {
  Group group;
  group.fill(1);
  group[0] = 0x1p-32F;
  group[1] = -0x1p-33F;
  const Group values = round_trip(Wire::kLogFmt10, group);
  EXPECT_EQ(values[0], 0x1p-32F);
  EXPECT_EQ(values[1], 0);
  EXPECT_TRUE(std::signbit(values[1]));
  EXPECT_NEAR(values[2], 1, 0.04);
}

TEST(WireTest, AGroupWithWhatIsNotFiniteIsNan) {
  for (const Wire wire : kWires) {
    for (const float odd : {kInfinite, -kInfinite, std::numeric_limits<float>::quiet_NaN()}) {
      Group group;
      group.fill(2);
      const Group other = group;
      group[77] = odd;
      const std::vector<std::byte> row = coded(wire, {other, group});
      for (const float value : read(wire, row, 2, 1)) {
        EXPECT_EQ(std::bit_cast<uint32_t>(value), kQuietNan);
      }
      for (const float value : read(wire, row, 2, 0)) {
        EXPECT_FALSE(std::isnan(value));
      }
    }
  }
}

// Two groups whose codes are known by heart.
TEST(WireTest, BytesLieWhereTheDocumentSays) {
  Group ones;
  ones.fill(1);
  Group two = ones;
  two[0] = 0;
  two[1] = -2;
  two[2] = 4;
  // The logarithms of 1 and 4 are 2 << 23 apart, which 510 steps of 16 * 2057 reach.
  const std::vector<std::byte> log = coded(Wire::kLogFmt10, {ones, two});
  ASSERT_EQ(log.size(), 336U);  // 256 + 64 + 8, up to a multiple of 16
  const auto byte = [](const std::vector<std::byte>& row, size_t at) {
    return std::to_integer<int>(row[at]);
  };
  const auto half = [&](size_t at) { return byte(log, at) | byte(log, at + 1) << 8; };
  EXPECT_EQ(half(320), 0x3f80);  // 1
  EXPECT_EQ(half(322), 1);
  EXPECT_EQ(half(324), 0x3f80);
  EXPECT_EQ(half(326), 2057);
  // Codes: 0; minus and 1 + 2^23 / 32912; 1 + 2^24 / 32912; 1.
  EXPECT_EQ(byte(log, 128), 0);
  EXPECT_EQ(byte(log, 129), 256 & 0xff);
  EXPECT_EQ(byte(log, 130), 511 & 0xff);
  EXPECT_EQ(byte(log, 131), 1);
  EXPECT_EQ(byte(log, 256 + 32), 0 | (2 | 1) << 2 | 1 << 4 | 0 << 6);
  EXPECT_EQ(byte(log, 0), 1);
  EXPECT_EQ(byte(log, 256), 0);

  const std::vector<std::byte> fp8 = coded(Wire::kFp8, {ones, two});
  ASSERT_EQ(fp8.size(), 272U);  // 256 + 8, up to a multiple of 16
  EXPECT_EQ(byte(fp8, 0), 0x7e);
  EXPECT_EQ(byte(fp8, 128), 0);
  EXPECT_EQ(byte(fp8, 129), 0x80 | 0x76);
  EXPECT_EQ(byte(fp8, 130), 0x7e);
  float scale = 0;
  std::memcpy(&scale, fp8.data() + 260, sizeof scale);
  EXPECT_EQ(scale, 4.0F / 448);
}

TEST(WireTest, RowsAreAboutHalfAsLong) {
  EXPECT_EQ(wire_row_bytes(Wire::kNone, 7168), 14336);
  EXPECT_EQ(wire_row_bytes(Wire::kFp8, 7168), 7392);
  EXPECT_EQ(wire_row_bytes(Wire::kLogFmt10, 7168), 9184);
  EXPECT_EQ(wire_row_bytes(Wire::kFp8, 128), 144);
  EXPECT_EQ(wire_row_bytes(Wire::kLogFmt10, 128), 176);
}

}  // namespace
}  // namespace weft
