// SPDX-License-Identifier: Apache-2.0
#include "train/step_model.hpp"

namespace weft::moe {

HostModel::HostModel(const StepModelParts& parts) : MicroBatchModels(parts) {
  for (const MicroBatch& micro_batch : parts.micro_batches) {
    models_.emplace_back(parts.context, micro_batch.shards, parts.layout, parts.memory);
  }
}

// With overlap all calls of the exchange come from the exchange lane, one thread for the whole run,
// in the order of the schedule, which is that of every rank.
LossShare HostModel::forward_backward(std::span<const Batch> batches) {
  run(batches, overlap::run_on_threads);
  LossShare share = models_.front().share();
  for (size_t idx = 1; idx < models_.size(); ++idx) {
    share += models_[idx].share();
  }
  return share;
}

void HostModel::update_experts(const AdamStep& step) {
  const Parameter& experts = parts_.memory.experts;
  adamw_update(step, experts.value, experts.grad, *parts_.expert_moments, 0, experts.value.size());
}

}  // namespace weft::moe
