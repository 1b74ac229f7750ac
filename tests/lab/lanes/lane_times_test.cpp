// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "train/lanes/schedule.hpp"

namespace weft::overlap::test {
namespace {

constexpr auto kCompute = Lane::kCompute;
constexpr auto kExchange = Lane::kExchange;

Trace trace_of(std::vector<Span> spans) {
  Trace trace = {std::move(spans)};
  sort_spans(trace);
  return trace;
}

Span span(Lane lane, int64_t begin, int64_t end) {
  return {0, "s", lane, 0, begin, end};
}

TEST(LaneTimesTest, CountsOnlyTheExchangeThatNoComputationCovers) {
  const LaneTimes times = lane_times(trace_of({
      span(kCompute, 10, 30),
      span(kCompute, 40, 50),
      span(kCompute, 60, 100),
      span(kExchange, 0, 20),    // 10 before anything computes
      span(kExchange, 25, 65),   // 10 and 10 in the gaps
      span(kExchange, 70, 80),   // hidden
      span(kExchange, 95, 120),  // 20 at the end
  }));
  EXPECT_EQ(times.wall_ns, 120);
  EXPECT_EQ(times.busy_ns[lane_idx(kCompute)], 70);
  EXPECT_EQ(times.busy_ns[lane_idx(kExchange)], 95);
  EXPECT_EQ(times.exposed_ns, 50);
}

TEST(LaneTimesTest, ExposesAllOfAnExchangeWithNothingBesideIt) {
  const LaneTimes times = lane_times(trace_of({
      span(kCompute, 0, 10),
      span(kExchange, 10, 25),
      span(kCompute, 25, 25),  // only waits
      span(kCompute, 25, 30),
  }));
  EXPECT_EQ(times.exposed_ns, 15);
  EXPECT_EQ(times.busy_ns[lane_idx(kCompute)], 15);
}

TEST(LaneTimesTest, HasNothingToSayOfAnEmptyTrace) {
  const LaneTimes times = lane_times({});
  EXPECT_EQ(times.wall_ns, 0);
  EXPECT_EQ(times.exposed_ns, 0);
}

TEST(LaneTimesTest, CountsTimeOnceWhereSpansOfALaneTouch) {
  const LaneTimes times = lane_times(trace_of({
      span(kExchange, 0, 10),
      span(kExchange, 10, 20),
      span(kCompute, 5, 15),
  }));
  EXPECT_EQ(times.busy_ns[lane_idx(kExchange)], 20);
  EXPECT_EQ(times.exposed_ns, 10);
}

}  // namespace
}  // namespace weft::overlap::test
