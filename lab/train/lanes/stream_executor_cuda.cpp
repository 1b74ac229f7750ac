// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <array>
#include <vector>

#include "core/gpu/check.hpp"
#include "train/gpu/timed_event.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap {

Trace run_on_streams(const Schedule& steps, cudaStream_t compute, cudaStream_t exchange) {
  const std::array<cudaStream_t, kNumLanes> streams = {compute, exchange};  // by lane
  const TimedEvent start;
  const std::vector<TimedEvent> begin(steps.size());
  const std::vector<TimedEvent> end(steps.size());
  try {
    start.record(compute);
    start.make_wait(exchange);
    for (size_t idx = 0; idx < steps.size(); ++idx) {
      const Step& step = steps[idx];
      const cudaStream_t stream = streams[lane_idx(step.lane)];
      for (const int wait : step.waits) {
        const auto before = static_cast<size_t>(wait);
        if (steps[before].lane != step.lane) {
          end[before].make_wait(stream);
        }
      }
      begin[idx].record(stream);
      if (step.work) {
        step.work({step.lane, stream});
      }
      end[idx].record(stream);
    }
    for (const cudaStream_t stream : streams) {
      WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
    }
  } catch (...) {
    // What is enqueued may still use what the caller then gives back.
    for (const cudaStream_t stream : streams) {
      static_cast<void>(cudaStreamSynchronize(stream));
    }
    throw;
  }
  const auto ns_of = [&](const TimedEvent& event) {
    return static_cast<int64_t>(event.ms_after(start) * 1e6);
  };
  Trace trace;
  for (size_t idx = 0; idx < steps.size(); ++idx) {
    const Step& step = steps[idx];
    trace.spans.push_back(
        {static_cast<int>(idx),
         step.name,
         step.lane,
         step.micro_batch,
         ns_of(begin[idx]),
         ns_of(end[idx])}
    );
  }
  sort_spans(trace);
  return trace;
}

}  // namespace weft::overlap
