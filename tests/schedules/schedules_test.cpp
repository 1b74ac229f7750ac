// SPDX-License-Identifier: Apache-2.0
// The CPU executor under ten thousand schedules (`make nightly`: a million, by weft_schedules).
#include <gtest/gtest.h>

#include "schedules/run.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kParts = 4;
constexpr uint64_t kRuns = WEFT_SCHEDULES / kParts;

class SchedulesTest : public testing::TestWithParam<uint64_t> {};

TEST_P(SchedulesTest, EndRightOrNameARank) {
  const uint64_t first = GetParam() * kRuns;
  for (uint64_t seed = first; seed < first + kRuns; ++seed) {
    const ScheduledRun run = run_schedule(seed);
    ASSERT_EQ(run.failure, "") << run.story
                               << "\nagain: build/cpu/tests/schedules/weft_schedules --seed "
                               << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, SchedulesTest, testing::Range(uint64_t{0}, kParts));

TEST(SchedulesReplayTest, ASeedGivesTheSameRun) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const ScheduledRun run = run_schedule(seed);
    EXPECT_EQ(run_schedule(seed), run) << run.story;
    EXPECT_NE(run_schedule(seed + 1000).trace, run.trace);
  }
}

class PlantedTest : public testing::TestWithParam<Planted> {};

TEST_P(PlantedTest, DefectsAreFoundAndFoundAgain) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    const ScheduledRun run = run_schedule(seed, GetParam());
    if (!run.failure.empty()) {
      EXPECT_EQ(run_schedule(seed, GetParam()), run) << run.story;
      return;
    }
  }
  FAIL() << "500 runs found nothing";
}

INSTANTIATE_TEST_SUITE_P(
    Defects, PlantedTest, testing::Values(Planted::kSignalFirst, Planted::kOneEarly)
);

}  // namespace
}  // namespace weft::test
