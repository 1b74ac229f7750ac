// SPDX-License-Identifier: Apache-2.0
#include "core/float_state.hpp"

#include <gtest/gtest.h>

#include <cfenv>

#include "support/float_state.hpp"

namespace weft::test {
namespace {

TEST(StandardFloatsTest, KeepSubnormalsAndRoundToNearestUntilTheyEnd) {
  const OddFloats odd;
  ASSERT_NE(product_bits(), kStandardProducts) << "the thread's state has an effect";
  const Products before = product_bits();
  {
    const StandardFloats floats;
    EXPECT_EQ(product_bits(), kStandardProducts);
    {
      const StandardFloats again;
      EXPECT_EQ(product_bits(), kStandardProducts);
    }
    EXPECT_EQ(product_bits(), kStandardProducts);
  }
  EXPECT_EQ(product_bits(), before);
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
}

TEST(StandardFloatsTest, LeaveAThreadThatIsStandardAsItIs) {
  {
    const StandardFloats floats;
    EXPECT_EQ(product_bits(), kStandardProducts);
  }
  EXPECT_EQ(product_bits(), kStandardProducts);
}

}  // namespace
}  // namespace weft::test
