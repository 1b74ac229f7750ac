// SPDX-License-Identifier: Apache-2.0
// Two lanes on two threads: order, failure, and use after failure.
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <stdexcept>
#include <thread>

#include "lab/lanes/plain_nodes.hpp"

namespace weft::overlap::test {
namespace {

Step step(std::string name, Lane lane, Work work, std::vector<int> waits = {}) {
  Step made;
  made.name = std::move(name);
  made.lane = lane;
  made.work = std::move(work);
  made.waits = std::move(waits);
  return made;
}

const Work kNothing = [](const LaneContext&) {};

Work throwing(const char* text) {
  return [=](const LaneContext&) { throw std::runtime_error(text); };
}

// Returns the text that the run throws; "nothing" if it throws nothing.
std::string failure_of(const Schedule& schedule) {
  try {
    run_on_threads(schedule);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

TEST(ThreadExecutorTest, RunsEveryStepOnceAfterWhatItWaitsFor) {
  const Schedule schedule = schedule_overlapped({4, [](int) { return plain_nodes({3}); }});
  const Trace trace = run_on_threads(schedule);
  ASSERT_EQ(trace.spans.size(), schedule.size());
  std::map<int, Span> by_step;
  std::map<Lane, Span> last;
  for (const Span& span : trace.spans) {
    EXPECT_TRUE(by_step.emplace(span.step, span).second);
    EXPECT_LE(span.begin_ns, span.end_ns);
    if (last.contains(span.lane)) {
      EXPECT_LT(last[span.lane].step, span.step);
      EXPECT_LE(last[span.lane].end_ns, span.begin_ns);
    }
    last[span.lane] = span;
  }
  for (size_t idx = 0; idx < schedule.size(); ++idx) {
    for (const int wait : schedule[idx].waits) {
      EXPECT_LE(by_step[wait].end_ns, by_step[static_cast<int>(idx)].begin_ns);
    }
  }
}

TEST(ThreadExecutorTest, RunsEachLaneOnAThreadOfItsOwn) {
  std::array<std::thread::id, kNumLanes> threads;
  const Work note = [&](const LaneContext& context) {
    threads[lane_idx(context.lane)] = std::this_thread::get_id();
  };
  Schedule schedule;
  schedule.push_back(step("a", Lane::kCompute, note));
  schedule.push_back(step("b", Lane::kExchange, note));
  run_on_threads(schedule);
  EXPECT_EQ(threads[0], std::this_thread::get_id());
  EXPECT_NE(threads[1], std::this_thread::get_id());
  EXPECT_NE(threads[1], std::thread::id());
}

// Each waits for the other inside its callback: this ends only if both run at the same time.
TEST(ThreadExecutorTest, RunsBothLanesAtTheSameTime) {
  std::promise<void> compute_is_in;
  std::promise<void> exchange_is_in;
  Schedule schedule;
  schedule.push_back(step("compute", Lane::kCompute, [&](const LaneContext&) {
    compute_is_in.set_value();
    exchange_is_in.get_future().wait();
  }));
  schedule.push_back(step("exchange", Lane::kExchange, [&](const LaneContext&) {
    exchange_is_in.set_value();
    compute_is_in.get_future().wait();
  }));
  EXPECT_EQ(run_on_threads(schedule).spans.size(), 2U);
}

class ThreadFailureTest : public testing::TestWithParam<Lane> {};

TEST_P(ThreadFailureTest, StopsBothLanesAndReachesTheCaller) {
  const Lane lane = GetParam();
  const Lane other = lane == Lane::kCompute ? Lane::kExchange : Lane::kCompute;
  bool later_ran = false;
  const Work later = [&](const LaneContext&) { later_ran = true; };
  Schedule schedule;
  schedule.push_back(step("first", lane, kNothing));
  schedule.push_back(step("failing", lane, throwing("broken")));
  schedule.push_back(step("waiting", other, later, {1}));
  schedule.push_back(step("next", lane, later));

  EXPECT_EQ(failure_of(schedule), "broken");
  EXPECT_FALSE(later_ran);

  Schedule good;
  good.push_back(step("good", lane, later));
  EXPECT_EQ(run_on_threads(good).spans.size(), 1U);
  EXPECT_TRUE(later_ran);
}

INSTANTIATE_TEST_SUITE_P(
    Lanes, ThreadFailureTest, testing::Values(Lane::kCompute, Lane::kExchange)
);

TEST(ThreadExecutorTest, RunsAnEmptySchedule) {
  EXPECT_TRUE(run_on_threads(Schedule()).spans.empty());
}

}  // namespace
}  // namespace weft::overlap::test
