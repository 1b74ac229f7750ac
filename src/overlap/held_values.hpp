// SPDX-License-Identifier: Apache-2.0
// Which values exist during a run, so that each is released once whether the run ends or fails.
#pragma once

#include <vector>

#include "overlap/schedule.hpp"

namespace weft::overlap {

// Lanes may call it at the same time for steps that the schedule orders; check_schedule() says
// whether it orders those that share a value.
class HeldValues {
 public:
  // What no step writes exists from the start.
  explicit HeldValues(const Schedule& schedule);

  // The step may write from here on, even if it then throws.
  void begin_step(const Step& step);
  // Releases what the step frees.
  void end_step(const Step& step, const LaneContext& context);
  // After a failure, once no step runs any more: releases the rest, the newest first. What a
  // release throws is dropped, as the run already has an error to report.
  void release_all(const LaneContext& context) noexcept;

 private:
  const Schedule& schedule_;
  std::vector<char> is_held_;  // not bool: lanes write neighbours
};

}  // namespace weft::overlap
