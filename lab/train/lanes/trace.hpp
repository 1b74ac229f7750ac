// SPDX-License-Identifier: Apache-2.0
// What ran when, a file of it that chrome://tracing and ui.perfetto.dev show, and how much of the
// exchange nothing hid.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "weft/overlap.hpp"

namespace weft::overlap {

struct Span {
  int step = -1;  // in the schedule
  std::string name;
  Lane lane = Lane::kCompute;
  int micro_batch = -1;
  int64_t begin_ns = 0;  // since the run began
  int64_t end_ns = 0;
};

struct Trace {
  std::vector<Span> spans;  // by begin, then by step
};

// Into the order that Trace promises.
void sort_spans(Trace& trace);

// Chrome's trace format: one process with a row for each lane.
[[nodiscard]] std::string trace_json(const Trace& trace);

// Throws Error (kFile) naming the path.
void write_trace(const std::string& path, const Trace& trace);

struct LaneTimes {
  int64_t wall_ns = 0;                          // from the first begin to the last end
  std::array<int64_t, kNumLanes> busy_ns = {};  // by lane; waiting for the other lane is not in it
  int64_t exposed_ns = 0;                       // the exchange lane was busy, the compute lane not
};

[[nodiscard]] LaneTimes lane_times(const Trace& trace);

}  // namespace weft::overlap
