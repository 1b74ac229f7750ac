// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "support/run_case.hpp"

namespace weft::test {
namespace {

TEST(ExchangeTest, CarriesTokensBetweenTwoRanks) {
  ExchangeSetup setup;
  Case spec;
  spec.num_tokens = {50, 64};
  EXPECT_EQ(run_on_threads(setup, spec), "");
}

}  // namespace
}  // namespace weft::test
