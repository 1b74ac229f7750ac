// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/atomic_file.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap {
namespace {

using Json = nlohmann::ordered_json;

Json lane_row(Lane lane) {
  return {
      {"name", "thread_name"},
      {"ph", "M"},
      {"pid", 0},
      {"tid", lane_idx(lane)},
      {"args", {{"name", lane_name(lane)}}}};
}

// The format counts in microseconds.
Json span_event(const Span& span) {
  return {
      {"name", span.name},
      {"cat", lane_name(span.lane)},
      {"ph", "X"},
      {"ts", static_cast<double>(span.begin_ns) / 1e3},
      {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1e3},
      {"pid", 0},
      {"tid", lane_idx(span.lane)},
      {"args", {{"step", span.step}, {"micro_batch", span.micro_batch}}}};
}

// Returns for how many nanoseconds at least one of these lanes worked.
int64_t busy_ns(const Trace& trace, std::initializer_list<Lane> lanes) {
  int64_t sum = 0;
  int64_t reached = 0;
  for (const Span& span : trace.spans) {  // by begin
    if (std::find(lanes.begin(), lanes.end(), span.lane) != lanes.end()) {
      sum += std::max<int64_t>(span.end_ns - std::max(span.begin_ns, reached), 0);
      reached = std::max(reached, span.end_ns);
    }
  }
  return sum;
}

}  // namespace

void sort_spans(Trace& trace) {
  std::sort(trace.spans.begin(), trace.spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.begin_ns, a.step) < std::tie(b.begin_ns, b.step);
  });
}

std::string trace_json(const Trace& trace) {
  auto events = Json::array({lane_row(Lane::kCompute), lane_row(Lane::kExchange)});
  for (const Span& span : trace.spans) {
    events.push_back(span_event(span));
  }
  return Json({{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}}).dump(1) + "\n";
}

void write_trace(const std::string& path, const Trace& trace) {
  write_file_atomically(path, trace_json(trace));
}

LaneTimes lane_times(const Trace& trace) {
  LaneTimes times;
  times.busy_ns = {busy_ns(trace, {Lane::kCompute}), busy_ns(trace, {Lane::kExchange})};
  times.exposed_ns = busy_ns(trace, {Lane::kCompute, Lane::kExchange}) - times.busy_ns[0];
  if (!trace.spans.empty()) {
    const Span& last = *std::ranges::max_element(trace.spans, {}, &Span::end_ns);
    times.wall_ns = last.end_ns - trace.spans.front().begin_ns;
  }
  return times;
}

}  // namespace weft::overlap
