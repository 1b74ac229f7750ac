// SPDX-License-Identifier: Apache-2.0
#include "overlap/lane_times.hpp"

#include <algorithm>
#include <vector>

namespace weft::overlap {
namespace {

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
};

// When the lane was busy: in order, without touching neighbours.
std::vector<Interval> busy_intervals(const Trace& trace, Lane lane) {
  std::vector<Interval> found;
  for (const Span& span : trace.spans) {  // by begin
    if (span.lane != lane || span.end_ns <= span.begin_ns) {
      continue;
    }
    if (!found.empty() && span.begin_ns <= found.back().end) {
      found.back().end = std::max(found.back().end, span.end_ns);
    } else {
      found.push_back({span.begin_ns, span.end_ns});
    }
  }
  return found;
}

int64_t length(const std::vector<Interval>& intervals) {
  int64_t sum = 0;
  for (const Interval& interval : intervals) {
    sum += interval.end - interval.begin;
  }
  return sum;
}

// What of `these` lies in none of `those`.
int64_t length_outside(const std::vector<Interval>& these, const std::vector<Interval>& those) {
  int64_t sum = 0;
  size_t first = 0;
  for (const Interval& interval : these) {
    while (first < those.size() && those[first].end <= interval.begin) {
      ++first;
    }
    int64_t reached = interval.begin;
    for (size_t idx = first; idx < those.size() && those[idx].begin < interval.end; ++idx) {
      sum += std::max<int64_t>(those[idx].begin - reached, 0);
      reached = std::max(reached, those[idx].end);
    }
    sum += std::max<int64_t>(interval.end - reached, 0);
  }
  return sum;
}

}  // namespace

LaneTimes lane_times(const Trace& trace) {
  const auto compute = busy_intervals(trace, Lane::kCompute);
  const auto exchange = busy_intervals(trace, Lane::kExchange);
  LaneTimes times;
  times.busy_ns[lane_idx(Lane::kCompute)] = length(compute);
  times.busy_ns[lane_idx(Lane::kExchange)] = length(exchange);
  times.exposed_ns = length_outside(exchange, compute);
  if (!trace.spans.empty()) {
    int64_t end = trace.spans.front().end_ns;
    for (const Span& span : trace.spans) {
      end = std::max(end, span.end_ns);
    }
    times.wall_ns = end - trace.spans.front().begin_ns;
  }
  return times;
}

}  // namespace weft::overlap
