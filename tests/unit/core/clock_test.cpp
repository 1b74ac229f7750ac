// SPDX-License-Identifier: Apache-2.0
#include "core/clock.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

using namespace std::chrono_literals;

TEST(DeadlineTest, OnePastHasNothingLeft) {
  const Deadline deadline(-1ms);
  EXPECT_TRUE(deadline.has_passed());
  EXPECT_EQ(deadline.left(), 0ms);
}

TEST(DeadlineTest, OneToComeHasNoMoreLeftThanItsTimeout) {
  const Deadline deadline(1h);
  EXPECT_FALSE(deadline.has_passed());
  EXPECT_GT(deadline.left(), 0ms);
  EXPECT_LE(deadline.left(), 1h);
  EXPECT_EQ(deadline.timeout(), 1h);
}

TEST(DeadlineTest, SecondsHaveOneDecimal) {
  EXPECT_EQ(seconds_text(30s), "30.0 s");
  EXPECT_EQ(seconds_text(1250ms), "1.2 s");
}

}  // namespace
}  // namespace weft
