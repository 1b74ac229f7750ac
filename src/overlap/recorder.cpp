// SPDX-License-Identifier: Apache-2.0
#include "overlap/recorder.hpp"

#include <algorithm>

#include "overlap/check_schedule.hpp"

namespace weft::overlap {
namespace {

constexpr int64_t kStepNs = 1000;

}  // namespace

Trace Recorder::run(const Schedule& schedule) {
  check_schedule(schedule);
  Trace trace;
  std::array<int64_t, kNumLanes> lane_end = {};
  for (const Step& step : schedule.steps()) {
    int64_t begin = lane_end[lane_idx(step.lane)];
    for (const int wait : step.waits) {
      begin = std::max(begin, trace.spans[static_cast<size_t>(wait)].end_ns);
    }
    const int64_t end = begin + (step.work ? kStepNs : 0);
    lane_end[lane_idx(step.lane)] = end;
    const int idx = static_cast<int>(trace.spans.size());
    trace.spans.push_back({idx, step.name, step.lane, step.micro_batch, begin, end});
  }
  sort_spans(trace);
  return trace;
}

}  // namespace weft::overlap
