// SPDX-License-Identifier: Apache-2.0
#include "moe/model.hpp"

#include "moe/loss.hpp"

namespace weft::moe {

Model::Model(MoeContext& context, const ModelLayout& layout, const ModelMemory& memory)
    : context_(&context),
      embedding_(
          layout.embedding.in(memory.replicated), context.config.window, context.config.hidden
      ),
      head_(layout.final_norm.in(memory.replicated), layout.head.in(memory.replicated)) {
  blocks_.reserve(layout.blocks.size());
  for (const BlockLayout& block : layout.blocks) {
    blocks_.emplace_back(context, block, memory);
  }
}

LossShare Model::forward_backward(const Batch& batch) {
  LossShare share;
  embedding_.forward(batch.windows, x_);
  for (MoeBlock& block : blocks_) {
    block.forward(x_);
    share.balance += block.balance_share() / static_cast<double>(blocks_.size());
  }
  const Shards& shards = context_->shards;
  head_.forward(x_, logits_, shards);
  const float scale = 1.0F / static_cast<float>(context_->global_tokens);
  for (const Range& shard : shards) {
    const auto targets = std::span(batch.targets).subspan(static_cast<size_t>(shard.begin));
    share.cross_entropy.push_back(cross_entropy(slice(rows_of(logits_), shard), targets, scale));
  }

  head_.backward(logits_, x_, shards);
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
    block->backward(x_);
  }
  embedding_.backward(batch.windows, x_, shards);
  return share;
}

}  // namespace weft::moe
