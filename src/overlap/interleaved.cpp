// SPDX-License-Identifier: Apache-2.0
#include "overlap/interleaved.hpp"

#include <algorithm>
#include <deque>
#include <utility>

#include "core/check.hpp"
#include "overlap/chunk_order.hpp"

namespace weft::overlap {
namespace {

void check_shape(const PipelineShape& shape) {
  WEFT_CHECK_ARG(
      Context{},
      shape.rank >= 0 && shape.rank < shape.num_ranks,
      "schedule: rank {} of a pipeline of {}",
      shape.rank,
      shape.num_ranks
  );
  WEFT_CHECK_ARG(
      Context{}, shape.num_chunks > 0, "schedule: {} chunks (at least 1)", shape.num_chunks
  );
  WEFT_CHECK_ARG(
      Context{},
      shape.num_micro_batches > 0 && shape.num_micro_batches % shape.num_ranks == 0,
      "schedule: {} micro-batches in a pipeline of {} ranks (a multiple of them)",
      shape.num_micro_batches,
      shape.num_ranks
  );
}

Work transfer(const PointToPoint::Transfer& call, const VirtualStage& stage) {
  if (!call) {
    return {};
  }
  return [call, stage](const LaneContext& context) { call(stage, context); };
}

ChunkNodes linked_nodes(const InterleavedBatches& batches, const VirtualStage& stage) {
  const PipelineShape& shape = batches.shape;
  const bool is_first = shape.rank == 0 && stage.chunk == 0;
  const bool is_last = shape.rank == shape.num_ranks - 1 && stage.chunk == shape.num_chunks - 1;
  ChunkNodes nodes = batches.nodes(stage);
  nodes.pre_forward = is_first ? Work() : transfer(batches.link.receive_forward, stage);
  nodes.post_forward = is_last ? Work() : transfer(batches.link.send_forward, stage);
  nodes.pre_backward = is_last ? Work() : transfer(batches.link.receive_backward, stage);
  nodes.post_backward = is_first ? Work() : transfer(batches.link.send_backward, stage);
  return nodes;
}

}  // namespace

std::vector<VirtualStage> forward_order(const PipelineShape& shape) {
  check_shape(shape);
  std::vector<VirtualStage> order;
  for (int first = 0; first < shape.num_micro_batches; first += shape.num_ranks) {
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
      for (int idx = 0; idx < shape.num_ranks; ++idx) {
        order.push_back({first + idx, chunk});
      }
    }
  }
  return order;
}

std::vector<VirtualStage> backward_order(const PipelineShape& shape) {
  std::vector<VirtualStage> order = forward_order(shape);
  for (VirtualStage& stage : order) {
    stage.chunk = shape.num_chunks - 1 - stage.chunk;
  }
  return order;
}

int num_warm_up(const PipelineShape& shape) {
  check_shape(shape);
  const int until_first_backward =
      2 * (shape.num_ranks - shape.rank - 1) + (shape.num_chunks - 1) * shape.num_ranks;
  return std::min(until_first_backward + 1, shape.num_micro_batches * shape.num_chunks);
}

Schedule schedule_interleaved(const InterleavedBatches& batches, const OverlapOptions& options) {
  const std::vector<VirtualStage> forwards = forward_order(batches.shape);
  const std::vector<VirtualStage> backwards = backward_order(batches.shape);
  const auto warm_up = static_cast<size_t>(num_warm_up(batches.shape));
  Schedule schedule;
  std::deque<ChunkPlan> plans;  // in the order of forwards
  for (const VirtualStage& stage : forwards) {
    plans.emplace_back(
        schedule,
        linked_nodes(batches, stage),
        fmt::format("m{}.c{}", stage.micro_batch, stage.chunk),
        stage.micro_batch
    );
  }
  const auto backward_plan = [&](size_t idx) {
    const auto place = std::find(forwards.begin(), forwards.end(), backwards[idx]);
    return &plans[static_cast<size_t>(place - forwards.begin())];
  };

  for (size_t idx = 0; idx < warm_up; ++idx) {
    issue_chunks(&plans[idx], nullptr, options);
  }
  const size_t num_pairs = plans.size() - warm_up;
  for (size_t idx = 0; idx < num_pairs; ++idx) {
    issue_chunks(&plans[warm_up + idx], backward_plan(idx), options);
  }
  for (size_t idx = num_pairs; idx < plans.size(); ++idx) {
    issue_chunks(nullptr, backward_plan(idx), options);
  }
  return schedule;
}

}  // namespace weft::overlap
