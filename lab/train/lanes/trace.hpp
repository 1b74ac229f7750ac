// SPDX-License-Identifier: Apache-2.0
// What ran when, and a file of it that chrome://tracing and ui.perfetto.dev show.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "overlap/lane.hpp"

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

// Chrome's trace format: one process with a row for each lane. `process` tells ranks apart once
// their files are joined.
[[nodiscard]] std::string trace_json(const Trace& trace, int process = 0);

// Throws Error (kFile) naming the path.
void write_trace(const std::string& path, const Trace& trace, int process = 0);

}  // namespace weft::overlap
