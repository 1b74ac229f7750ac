// SPDX-License-Identifier: Apache-2.0
#include "train/step_model.hpp"

#include "train/chunk_nodes.hpp"
#include "train/lanes/thread_executor.hpp"

namespace weft::moe {

overlap::ChunkNodes nodes_of(Model& model, const OverlapConfig& config) {
  overlap::ChunkNodes nodes = chunk_nodes(model, config);
  for (size_t idx = 0; idx < nodes.layers.size(); ++idx) {
    MoeBlock& block = model.blocks()[idx];
    nodes.layers[idx].mlp.release = [&block](const overlap::LaneContext&) {
      block.release_rows();
      block.release_grads();
    };
  }
  return nodes;
}

HostModel::HostModel(
    MoeContext& context,
    std::span<const MicroBatch> micro_batches,
    const OverlapConfig& overlap,
    const ModelLayout& layout,
    const ModelMemory& memory
)
    : context_(&context), overlap_(overlap) {
  for (const MicroBatch& micro_batch : micro_batches) {
    models_.emplace_back(context, micro_batch.shards, layout, memory);
  }
}

LossShare HostModel::forward_backward(std::span<const Batch> batches) {
  for (size_t idx = 0; idx < models_.size(); ++idx) {
    models_[idx].load(batches[idx]);
  }
  if (overlap_.is_on) {
    run_overlapped();
  } else {
    for (Model& model : models_) {
      static_cast<void>(model.forward_backward());
    }
  }
  LossShare share = models_.front().share();
  for (size_t idx = 1; idx < models_.size(); ++idx) {
    share += models_[idx].share();
  }
  return share;
}

// All calls of the exchange come from the exchange lane, one thread for the whole run, in the order
// of the schedule, which is that of every rank.
void HostModel::run_overlapped() {
  const auto nodes = [&](int idx) { return nodes_of(models_[static_cast<size_t>(idx)], overlap_); };
  context_->timer.pause();
  trace_ = overlap::ThreadExecutor().run(
      overlap::schedule_overlapped({.num = static_cast<int>(models_.size()), .nodes = nodes})
  );
}

}  // namespace weft::moe
