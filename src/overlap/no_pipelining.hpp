// SPDX-License-Identifier: Apache-2.0
// All micro-batches of a step on one stage, without a pipeline.
#pragma once

#include <functional>

#include "overlap/layer_order.hpp"
#include "overlap/nodes.hpp"
#include "overlap/schedule.hpp"

namespace weft::overlap {

struct MicroBatches {
  int num = 1;
  // The callbacks of one micro-batch; called once for each, in order, before anything runs.
  std::function<ChunkNodes(int micro_batch)> nodes = {};
  // Around all but the last backward; may be empty. Between them gradients are only summed up, not
  // sent to other ranks. On the compute lane.
  Work enter_no_sync = {};
  Work exit_no_sync = {};
};

// F0, then each backward with the next forward, then the last backward. Steps are named
// "m<micro-batch>.L<layer>.<node>.<fwd, bwd or backward_dw>". Throws Error (kInvalidArgument).
[[nodiscard]] Schedule schedule_overlapped(
    const MicroBatches& batches, const OverlapOptions& options = {}
);

// The same steps with nothing woven: F0, B0, F1, B1, ... What results are compared with.
[[nodiscard]] Schedule schedule_sequential(
    const MicroBatches& batches, const OverlapOptions& options = {}
);

}  // namespace weft::overlap
