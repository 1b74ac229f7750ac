// SPDX-License-Identifier: Apache-2.0
// Everything that a rank needs for the forward and backward of a step, without a trainer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "train/batch.hpp"
#include "train/layers/parameters.hpp"
#include "train/rank.hpp"
#include "training_runs.hpp"

namespace weft::moe {

struct StepOptions {
  int num_micro_batches = 2;
  OverlapConfig overlap = {};
  DType dtype = DType::kFloat32;
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
};

class StepRig {
 public:
  StepRig(const Group& group, const StepOptions& options)
      : options_(options),
        layout_(make_layout(config_, group.rank(), group.num_ranks())),
        exchange_(
            group,
            {.hidden = config_.hidden,
             .max_tokens = kGlobalTokens,
             .num_experts = config_.num_experts,
             .max_topk = config_.topk,
             .num_threads = 1,
             .timeout = options.timeout}
        ),
        micro_batches_(make_micro_batches(
            kGlobalTokens, options.num_micro_batches, group.rank(), group.num_ranks()
        )),
        values_(layout_.num_replicated),
        grads_(micro_batches_.front().shards.size() * layout_.num_replicated),
        expert_values_(layout_.num_expert),
        expert_grads_(layout_.num_expert),
        context_{exchange_, config_, options.dtype, kGlobalTokens, options.overlap.is_on},
        text_(make_text(500)),
        batches_(micro_batches_.size()) {
    initialise(layout_.replicated(), 3, values_);
    initialise(layout_.experts(), 3, expert_values_);
    const BatchSource source(text_, config_.window, 3);
    for (size_t i = 0; i < batches_.size(); ++i) {
      source.draw(0, micro_batches_[i].tokens, batches_[i]);
    }
  }

  [[nodiscard]] const OverlapConfig& overlap() const { return options_.overlap; }
  [[nodiscard]] const ModelLayout& layout() const { return layout_; }
  [[nodiscard]] MoeContext& context() { return context_; }
  [[nodiscard]] const std::vector<MicroBatch>& micro_batches() const { return micro_batches_; }
  [[nodiscard]] const std::vector<Batch>& batches() const { return batches_; }
  [[nodiscard]] ModelMemory memory() {
    return {
        {values_, std::span(grads_).first(layout_.num_replicated), layout_.num_replicated},
        {expert_values_, expert_grads_}};
  }
  // Returns the gradients of the replicated parameters by shard, then those of this rank's experts.
  [[nodiscard]] std::vector<float> grads() const {
    std::vector<float> all = grads_;
    all.insert(all.end(), expert_grads_.begin(), expert_grads_.end());
    return all;
  }
  void clear_grads() {
    std::ranges::fill(grads_, 0.0F);
    std::ranges::fill(expert_grads_, 0.0F);
  }

 private:
  static constexpr int64_t kGlobalTokens = 67;

  const ModelConfig config_ = small_config().model;
  StepOptions options_;
  ModelLayout layout_;
  Exchange exchange_;
  std::vector<MicroBatch> micro_batches_;
  std::vector<float> values_;
  std::vector<float> grads_;  // [shards, num_replicated]
  std::vector<float> expert_values_;
  std::vector<float> expert_grads_;
  MoeContext context_;
  std::vector<std::byte> text_;
  std::vector<Batch> batches_;
};

}  // namespace weft::moe
