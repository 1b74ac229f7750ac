// SPDX-License-Identifier: Apache-2.0
// The plan kernel's arithmetic, on the host: needs no GPU.
#include <gtest/gtest.h>

#include "cuda/layout/divide.hpp"
#include "cuda/plan/shared_map.hpp"

namespace weft::test {
namespace {

TEST(PlanNumbersTest, DividesExactly) {
  for (const uint32_t divisor : {1U, 2U, 3U, 5U, 7U, 32U, 33U, 255U, 256U, 2047U, 65535U}) {
    const FastDivide by(divisor);
    for (uint32_t value = 0; value < 65536; ++value) {
      ASSERT_EQ(by.divide(value), value / divisor) << value << " / " << divisor;
      ASSERT_EQ(by.remainder(value, value / divisor), value % divisor);
    }
  }
}

TEST(PlanNumbersTest, ClampsSlotsThatCannotBeNumbered) {
  EXPECT_EQ(slot_number(-1), 0U);
  EXPECT_EQ(slot_number(INT32_MAX), static_cast<uint32_t>(INT32_MAX));
  EXPECT_EQ(slot_number(int64_t{1} << 40), static_cast<uint32_t>(INT32_MAX));
  const SlotRun unnumbered = {slot_number(int64_t{1} << 40), slot_number(int64_t{1} << 41)};
  EXPECT_EQ(unnumbered.slot(0), -1);
  EXPECT_EQ(unnumbered.slot(INT32_MAX), -1);
}

TEST(PlanNumbersTest, DropsFromTheLimitOn) {
  const SlotRun run = {10, 12};
  EXPECT_EQ(run.slot(0), 10);
  EXPECT_EQ(run.slot(1), 11);
  EXPECT_EQ(run.slot(2), -1);
}

TEST(PlanNumbersTest, MasksTheLowLanes) {
  EXPECT_EQ(low_lanes(0), 0U);
  EXPECT_EQ(low_lanes(5), 0x1fU);
  EXPECT_EQ(low_lanes(32), 0xffffffffU);
}

TEST(PlanNumbersTest, CutsSpansWithoutGapOrOverlap) {
  for (const int32_t total : {0, 1, 5, 31, 512, 4096, INT32_MAX - 7}) {
    for (const uint32_t num_parts : {1U, 3U, 16U, 32U}) {
      int32_t next = 7;
      for (uint32_t part = 0; part < num_parts; ++part) {
        const PartSpan span = part_span(7, 7 + total, num_parts, part);
        ASSERT_EQ(span.first, next);
        ASSERT_GE(span.last, span.first);
        next = span.last;
      }
      ASSERT_EQ(next, 7 + total);
    }
  }
}

TEST(PlanNumbersTest, FitsSharedMemory) {
  for (const uint32_t num_ranks : {1U, 2U, 8U, 32U}) {
    EXPECT_LE((PlanSharedMap{num_ranks, 256}.num_bytes()), 64U * 1024);
    EXPECT_LE((PlanSharedMap{num_ranks, 2048}.num_bytes()), 160U * 1024);  // 8.0 has 163 KiB
    EXPECT_EQ((PlanSharedMap{num_ranks, 256}.num_threads()), kMaxPlanThreads);
  }
}

}  // namespace
}  // namespace weft::test
