// SPDX-License-Identifier: Apache-2.0
// All micro-batches of a step on one rank of a pipeline whose ranks hold several chunks of layers.
#pragma once

#include <functional>
#include <vector>

#include "overlap/layer_order.hpp"
#include "overlap/nodes.hpp"
#include "overlap/schedule.hpp"

namespace weft::overlap {

// Chunk c of rank r is stage c * num_ranks + r of the model.
struct PipelineShape {
  int rank = 0;
  int num_ranks = 1;
  int num_chunks = 1;         // of each rank
  int num_micro_batches = 1;  // a multiple of num_ranks
};

// One micro-batch in one chunk of this rank.
struct VirtualStage {
  int micro_batch = 0;
  int chunk = 0;
  bool operator==(const VirtualStage&) const = default;
};

// The order of forwards and of backwards on every rank: num_ranks micro-batches through one chunk,
// the same ones through the next. Throws Error (kInvalidArgument) for a shape that is none.
[[nodiscard]] std::vector<VirtualStage> forward_order(const PipelineShape& shape);
[[nodiscard]] std::vector<VirtualStage> backward_order(const PipelineShape& shape);

// Forwards before the first backward: one more than without overlap, so that a forward and the
// backward beside it need nothing of each other.
[[nodiscard]] int num_warm_up(const PipelineShape& shape);

// Brings values to and from the neighbours. A send returns without waiting for its receive.
struct PointToPoint {
  using Transfer = std::function<void(const VirtualStage&, const LaneContext&)>;

  Transfer receive_forward = {};   // compute lane; not for the first stage of the model
  Transfer send_forward = {};      // exchange lane; not for the last
  Transfer receive_backward = {};  // compute lane; not for the last
  Transfer send_backward = {};     // compute lane; not for the first
};

struct InterleavedBatches {
  PipelineShape shape = {};
  // Called once for each virtual stage before anything runs. Hooks are set here, from `link`.
  std::function<ChunkNodes(const VirtualStage&)> nodes = {};
  PointToPoint link = {};
};

// Warm-up forwards, pairs of a forward and a backward, the backwards that are left. Steps are named
// "m<micro-batch>.c<chunk>.L<layer>.<node>.<direction>". Throws Error (kInvalidArgument).
[[nodiscard]] Schedule schedule_interleaved(
    const InterleavedBatches& batches, const OverlapOptions& options = {}
);

}  // namespace weft::overlap
