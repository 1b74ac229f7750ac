// SPDX-License-Identifier: Apache-2.0
#include "cuda/layout/patience.hpp"

#include <gtest/gtest.h>

namespace weft {
namespace {

constexpr uint32_t kMs = 1'000'000;
constexpr uint32_t kSecond = 1'000 * kMs;

TEST(PatienceTest, AddsUpLooksAlsoWhereTheLowerHalfBeginsAgain) {
  const uint32_t begin = ~uint32_t{0} - 5 * kMs;
  Patience patience(begin);
  for (uint32_t ms = 1; ms <= 10; ++ms) {
    EXPECT_EQ(patience.look(begin + ms * kMs, kSecond), uint64_t{ms} * kMs);
  }
}

TEST(PatienceTest, CountsBeyondTheLowerHalf) {
  Patience patience(0);
  uint32_t now = 0;
  for (uint64_t look = 1; look <= 200; ++look) {
    EXPECT_EQ(patience.look(now += kSecond / 2, kSecond), look * kSecond / 2);
  }
}

// A machine that was paused, for 3 s, and a clock that was set back, by 1 ms.
TEST(PatienceTest, AJumpCostsOneLook) {
  for (const uint32_t jump : {3 * kSecond, 0U - kMs}) {
    Patience patience(7);
    EXPECT_EQ(patience.look(7 + jump, kSecond), kSecond);
    EXPECT_EQ(patience.look(7 + jump + kMs, kSecond), kSecond + kMs);
  }
}

TEST(PatienceTest, NoDeadlineIsOverBeforeTheThirdLook) {
  for (const uint64_t deadline : {uint64_t{kMs}, 30 * uint64_t{kSecond}}) {
    const uint32_t most = Patience::most_of(deadline);
    EXPECT_LE(most, kSecond);
    Patience patience(0);
    EXPECT_LE(patience.look(3 * kSecond, most), deadline);
    EXPECT_LE(patience.look(0, most), deadline);
  }
  Patience patience(0);
  const uint32_t most = Patience::most_of(kMs);
  patience.look(3 * kSecond, most);
  patience.look(0, most);
  EXPECT_GT(patience.look(3 * kSecond, most), kMs);
}

}  // namespace
}  // namespace weft
