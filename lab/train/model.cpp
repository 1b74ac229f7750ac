// SPDX-License-Identifier: Apache-2.0
#include "train/model.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "train/layers/dense.hpp"

namespace weft::moe {

LossShare& LossShare::operator+=(const LossShare& other) {
  std::ranges::transform(cross_entropy, other.cross_entropy, cross_entropy.begin(), std::plus<>());
  balance += other.balance;
  return *this;
}

Model::Model(
    MoeContext& context, Shards shards, const ModelLayout& layout, const ModelMemory& memory
)
    : context_(&context),
      shards_(std::make_unique<const Shards>(std::move(shards))),
      embedding_(
          layout.embedding.in(memory.replicated), context.config.window, context.config.hidden
      ),
      head_(layout.final_norm.in(memory.replicated), layout.head.in(memory.replicated)) {
  blocks_.reserve(layout.blocks.size());
  for (const BlockLayout& block : layout.blocks) {
    blocks_.emplace_back(context, *shards_, block, memory);
  }
}

void Model::pre_process() {
  context_->timer.start(Phase::kDense);
  embedding_.forward(batch_->windows, x_);
}

void Model::post_process() {
  context_->timer.start(Phase::kDense);
  head_.forward(x_, logits_, *shards_);
  const float scale = 1.0F / static_cast<float>(context_->global_tokens);
  cross_entropy_.clear();
  for (const Range& shard : *shards_) {
    const auto targets = std::span(batch_->targets).subspan(static_cast<size_t>(shard.begin));
    cross_entropy_.push_back(cross_entropy(slice(rows_of(logits_), shard), targets, scale));
  }
}

void Model::post_process_backward() {
  context_->timer.start(Phase::kDense);
  head_.backward(logits_, x_, *shards_);
}

void Model::pre_process_backward() {
  context_->timer.start(Phase::kDense);
  embedding_.backward(batch_->windows, x_, *shards_);
}

LossShare Model::share() const {
  LossShare share = {cross_entropy_};
  for (const MoeBlock& block : blocks_) {
    share.balance += block.balance_share() / static_cast<double>(blocks_.size());
  }
  return share;
}

}  // namespace weft::moe
