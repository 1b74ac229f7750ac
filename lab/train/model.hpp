// SPDX-License-Identifier: Apache-2.0
// Embedding, blocks, head and loss in one: what a rank computes for its share of a micro-batch. One
// model for each micro-batch that is under way; they share their parameters. step_model.hpp runs
// the pieces.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "train/batch.hpp"
#include "train/layers/block.hpp"

namespace weft::moe {

// This rank's part of the losses; the sum over the ranks is the loss of the global batch.
struct LossShare {
  std::vector<double> cross_entropy;  // [num_shards of this rank] nats per byte
  double balance = 0;                 // mean over the blocks

  // Adds the share of another micro-batch.
  LossShare& operator+=(const LossShare& other) {
    std::ranges::transform(
        cross_entropy, other.cross_entropy, cross_entropy.begin(), std::plus<>()
    );
    balance += other.balance;
    return *this;
  }
};

template <class Rank>
class Model {
 public:
  // `shards` of the tokens of this micro-batch, which is the first or the last of a step.
  Model(
      Rank& rank,
      Shards shards,
      bool is_first,
      bool is_last,
      const ModelLayout& layout,
      const Weights<ValueOf<Rank>>& weights
  )
      : rank_(&rank),
        tokens_(std::make_unique<Tokens<Rank>>(std::move(shards), is_first, is_last, rank.config())
        ),
        table_(weights.replicated.at(layout.embedding)),
        norm_(rank, *tokens_, weights.replicated.at(layout.final_norm)),
        head_(rank, *tokens_, weights.replicated.at(layout.head), kNumBytes),
        logits_(static_cast<size_t>(tokens_->num * kNumBytes)),
        grad_logits_(logits_.size()),
        losses_(static_cast<size_t>(tokens_->num)) {
    blocks_.reserve(layout.blocks.size());
    for (const BlockLayout& block : layout.blocks) {
      blocks_.emplace_back(rank, *tokens_, block, weights);
    }
  }

  // What the next forward and backward are of; must outlive them.
  void load(const Batch& batch) {
    const auto upload = [&](const std::vector<std::byte>& from, ArrayOf<Rank, uint8_t>& to) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(from.data());
      rank_->math().upload(std::span(bytes, from.size()), to);
    };
    upload(batch.windows, windows_);
    upload(batch.targets, targets_);
  }

  // The pieces of a forward and backward, in their order, the blocks' own aside: these compute and
  // call nobody. All of them add to the gradients of cross_entropy + balance_weight * sum of the
  // blocks' balancing losses.
  void pre_process() {
    start();
    rank_->math().embed(embedding(), table_.value, tokens_->x.data());
  }
  void post_process() {
    start();
    norm_.forward();
    head_.forward(norm_.normed(), logits_.data());
    rank_->math().cross_entropy(
        {tokens_->num, kNumBytes, logits_.data(), targets_.data(), loss_scale()},
        losses_.data(),
        grad_logits_.data()
    );
  }
  void post_process_backward() {
    start();
    ArrayOf<Rank, float>& grad_normed = rank_->scratch().grad_normed;
    rank_->math().clear(grad_normed);
    head_.backward(grad_logits_.data(), norm_.normed(), grad_normed.data());
    rank_->math().clear(tokens_->x);
    norm_.backward();
  }
  void pre_process_backward() {
    start();
    rank_->math().embed_backward(embedding(), tokens_->x.data(), table_, tokens_->shards);
  }
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { rank_->pause(lane); }

  // Fetches what share() needs; it is there once the compute lane is through.
  void finish() {
    rank_->math().download(losses_, host_losses_);
    std::ranges::for_each(blocks_, &Block<Rank>::finish);
  }
  // Of the last forward.
  [[nodiscard]] LossShare share() const {
    LossShare share;
    for (const Range& shard : tokens_->shards) {
      double sum = 0;
      for (int64_t t = shard.begin; t < shard.end; ++t) {
        sum += static_cast<double>(host_losses_[static_cast<size_t>(t)]);
      }
      share.cross_entropy.push_back(sum * static_cast<double>(loss_scale()));
    }
    for (const Block<Rank>& block : blocks_) {
      share.balance += block.balance_share() / static_cast<double>(blocks_.size());
    }
    return share;
  }

  [[nodiscard]] std::span<Block<Rank>> blocks() { return blocks_; }
  [[nodiscard]] std::span<const Block<Rank>> blocks() const { return blocks_; }

 private:
  void start() { rank_->start(overlap::Lane::kCompute, Phase::kDense); }
  [[nodiscard]] EmbeddingShape embedding() const {
    return {tokens_->num, rank_->config().window, rank_->config().hidden, windows_.data()};
  }
  [[nodiscard]] float loss_scale() const {
    return 1.0F / static_cast<float>(rank_->context().global_tokens);
  }

  Rank* rank_;
  std::unique_ptr<Tokens<Rank>> tokens_;  // in one place: blocks point to it
  Weight<ValueOf<Rank>> table_;
  std::vector<Block<Rank>> blocks_;
  Norm<Rank> norm_;                                 // before the head
  Linear<Rank> head_;                               // [kNumBytes, hidden]
  ArrayOf<Rank, uint8_t> windows_;                  // [num_tokens, window]
  ArrayOf<Rank, uint8_t> targets_;                  // [num_tokens]
  ArrayOf<Rank, float> logits_;                     // [num_tokens, kNumBytes]
  ArrayOf<Rank, ValueOf<Rank>> grad_logits_;        // the same
  ArrayOf<Rank, typename Rank::Math::Sum> losses_;  // [num_tokens]
  std::vector<typename Rank::Math::Sum> host_losses_;
};

}  // namespace weft::moe
