// SPDX-License-Identifier: Apache-2.0
// Who runs a schedule: thread_executor.hpp, stream_executor_cuda.hpp, or recorder.hpp, which only
// notes the order.
#pragma once

#include "overlap/schedule.hpp"
#include "overlap/trace.hpp"

namespace weft::overlap {

// Holds nothing between runs: after one that failed the next is as good as the first.
class Executor {
 public:
  Executor() = default;
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Runs every step once: those of a lane in the order of the schedule, none before those it waits
  // for, and frees what each step frees. Returns when all have ended. If a callback throws, no step
  // begins any more, every value that exists is released (LaneContext::lane is kCompute then), and
  // the first exception is thrown on.
  virtual Trace run(const Schedule& schedule) = 0;
};

}  // namespace weft::overlap
