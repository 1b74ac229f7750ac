// SPDX-License-Identifier: Apache-2.0
// Weight gradients that a backward left for later. One queue for one node of one micro-batch, whose
// steps follow each other: no lock.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>
#include <vector>

#include "overlap/lane.hpp"

namespace weft::overlap {

class WeightGradientQueue {
 public:
  // From the backward: left for run(), in this order.
  void put(Work gradient) { pending_.push_back(std::move(gradient)); }
  // Called in this order each time run() has emptied the queue: here gradients are sent to other
  // ranks. Stays.
  void add_hook(Work hook) { hooks_.push_back(std::move(hook)); }

  // Runs and drops what was put, the oldest first, then calls the hooks. What throws ends it: that
  // one is dropped, the rest stays, no hook is called.
  void run(const LaneContext& context);
  // Drops what was put: for the node's release_saved, as a run may stop before run() is called.
  void clear() { pending_.clear(); }

  [[nodiscard]] size_t size() const { return pending_.size(); }

 private:
  std::deque<Work> pending_;
  std::vector<Work> hooks_;
};

}  // namespace weft::overlap
