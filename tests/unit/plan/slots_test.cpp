// SPDX-License-Identifier: Apache-2.0
#include "plan/slots.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace weft {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

TEST(SlotsTest, SplitsAnExpertIntoRankAndLocalNumber) {
  for (int per_rank = 1; per_rank <= 5; ++per_rank) {
    for (int expert = 0; expert < 40; ++expert) {
      const int rank = owner_rank(expert, per_rank);
      const int local = local_expert(expert, per_rank);
      EXPECT_EQ(rank * per_rank + local, expert);
      EXPECT_GE(local, 0);
      EXPECT_LT(local, per_rank);
    }
  }
}

TEST(SlotsTest, PadsToTheNextMultipleAndZeroToZero) {
  for (int64_t multiple = 1; multiple <= 9; ++multiple) {
    EXPECT_EQ(padded_count(0, multiple), 0);
    for (int64_t rows = 1; rows < 50; ++rows) {
      const int64_t padded = padded_count(rows, multiple);
      EXPECT_EQ(padded % multiple, 0);
      EXPECT_GE(padded, rows);
      EXPECT_LT(padded - rows, multiple);
    }
  }
}

TEST(SlotsTest, PadsTheLargestCountsWithoutOverflow) {
  EXPECT_EQ(padded_count(kMaxRows, kMaxRows), kMaxRows);
  EXPECT_EQ(padded_count(kMaxRows, kMaxRows - 1), 2 * (kMaxRows - 1));
  EXPECT_EQ(padded_count(int64_t{1} << 61, 1), int64_t{1} << 61);
}

TEST(SlotsTest, StepsByPaddedRowsOrByStride) {
  EXPECT_EQ(block_step({false, 4, 0}, 5), 8);
  EXPECT_EQ(block_step({true, 4, 100}, 5), 100);
  EXPECT_EQ(block_step({true, 4, 3}, 5), 3);
}

TEST(SlotsTest, LimitsABlockByOutputOrStride) {
  EXPECT_EQ(block_limit({false, 4, 0}, 10, 64), 64);
  EXPECT_EQ(block_limit({true, 4, 16}, 32, 64), 48);
}

TEST(SlotsTest, CountsRowsBelowTheLimit) {
  EXPECT_EQ(rows_within(10, 5, 100), 5);
  EXPECT_EQ(rows_within(10, 5, 12), 2);
  EXPECT_EQ(rows_within(10, 5, 10), 0);
  EXPECT_EQ(rows_within(10, 5, 3), 0) << "a block behind the end of the output has no rows";
}

TEST(SlotsTest, DropsTheFirstSlotAtTheLimit) {
  EXPECT_EQ(slot_or_dropped(6, 7), 6);
  EXPECT_EQ(slot_or_dropped(7, 7), -1);
  EXPECT_EQ(slot_or_dropped(kMaxRows - 1, kMaxRows), kMaxRows - 1);
  EXPECT_EQ(slot_or_dropped(int64_t{1} << 40, kMaxRows), -1);
}

}  // namespace
}  // namespace weft
