// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <map>

#include "core/atomic_file.hpp"
#include "lab/lanes/plain_nodes.hpp"
#include "support/errors.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap::test {
namespace {

using weft::test::thrown_by;

Schedule some_schedule() {
  return schedule_overlapped({3, [](int) { return plain_nodes({2}); }});
}

int64_t nanoseconds(const nlohmann::json& microseconds) {
  return std::llround(microseconds.get<double>() * 1000);
}

TEST(OverlapTraceTest, SaysEveryField) {
  const Trace trace = {{{4, "m1.L0.mlp.fwd", Lane::kExchange, 1, 1500, 4000}}};
  const nlohmann::json expected = nlohmann::json::parse(R"({
    "traceEvents": [
      {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "compute"}},
      {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "exchange"}},
      {"name": "m1.L0.mlp.fwd", "cat": "exchange", "ph": "X", "ts": 1.5, "dur": 2.5, "pid": 0,
       "tid": 1, "args": {"step": 4, "micro_batch": 1}}],
    "displayTimeUnit": "ns"})");
  EXPECT_EQ(nlohmann::json::parse(trace_json(trace)), expected);
}

void expect_whole(const nlohmann::json& file, const Schedule& schedule) {
  std::map<int, int64_t> lane_end;
  size_t num_spans = 0;
  for (const auto& event : file.at("traceEvents")) {
    if (event.at("ph") != "X") {
      continue;
    }
    const auto idx = event.at("args").at("step").get<size_t>();
    EXPECT_EQ(event.at("name"), schedule.at(idx).name);
    const int lane = event.at("tid");
    EXPECT_EQ(static_cast<size_t>(lane), lane_idx(schedule.at(idx).lane));
    const int64_t begin = nanoseconds(event.at("ts"));
    EXPECT_LE(lane_end[lane], begin) << event.at("name");
    lane_end[lane] = begin + nanoseconds(event.at("dur"));
    ++num_spans;
  }
  EXPECT_EQ(num_spans, schedule.size());
  EXPECT_EQ(lane_end.size(), 2U);
}

TEST(OverlapTraceTest, HasNoOverlapWithinALane) {
  const Schedule schedule = some_schedule();
  expect_whole(nlohmann::json::parse(trace_json(run_on_threads(schedule))), schedule);
}

TEST(OverlapTraceTest, GoesToAFile) {
  const std::string path = testing::TempDir() + "overlap_trace_test.json";
  const Trace trace = run_on_threads(some_schedule());
  write_trace(path, trace);
  EXPECT_EQ(read_whole_file(path), trace_json(trace));
  std::filesystem::remove(path);
  const auto thrown = thrown_by([&] { write_trace("/no such folder/trace.json", trace); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->code, ErrorCode::kFile);
}

}  // namespace
}  // namespace weft::overlap::test
