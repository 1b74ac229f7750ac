// SPDX-License-Identifier: Apache-2.0
#include "measure/results.hpp"

#include <gtest/gtest.h>

namespace weft::program {
namespace {

ResultRow row_of(double us_p50, double limit_us) {
  ResultRow row;
  row.us_p50 = us_p50;
  row.limit_us = limit_us;
  return row;
}

// Copies are measured at another moment than calls, maybe a slower one.
TEST(ResultRowTest, IsNeverAboveItsLimit) {
  EXPECT_EQ(row_of(200, 50).percent_of_limit(), 25);
  EXPECT_EQ(row_of(50, 50).percent_of_limit(), 100);
  EXPECT_EQ(row_of(25, 50).percent_of_limit(), 100);
  EXPECT_EQ(row_of(0, 50).percent_of_limit(), 0);
}

}  // namespace
}  // namespace weft::program
