// SPDX-License-Identifier: Apache-2.0
#include "moe/host_model.hpp"

#include "moe/chunk_nodes.hpp"
#include "overlap/no_pipelining.hpp"
#include "overlap/thread_executor.hpp"

namespace weft::moe {
namespace {

template <class T>
void append(std::span<const T> from, std::vector<T>& to) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

overlap::ChunkNodes nodes_of(Model& model, const OverlapConfig& config) {
  overlap::ChunkNodes nodes = chunk_nodes(model, config);
  for (size_t idx = 0; idx < nodes.layers.size(); ++idx) {
    MoeBlock& block = model.blocks()[idx];
    overlap::Node& mlp = nodes.layers[idx].mlp;
    mlp.release_input = [&block](const overlap::LaneContext&) { block.release_rows(); };
    mlp.release_gradient = [&block](const overlap::LaneContext&) { block.release_grads(); };
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

const Plan& HostModel::plan(size_t micro_batch, int block) const {
  return block_of(models_[micro_batch], block).plan();
}

std::span<const int32_t> HostModel::topk_idx(int block) {
  all_topk_idx_.clear();
  for (const Model& model : models_) {
    append<int32_t>(block_of(model, block).router().topk_idx(), all_topk_idx_);
  }
  return all_topk_idx_;
}

std::span<const float> HostModel::weights(int block) {
  all_weights_.clear();
  for (const Model& model : models_) {
    append<float>(block_of(model, block).router().weights().span(), all_weights_);
  }
  return all_weights_;
}

}  // namespace weft::moe
