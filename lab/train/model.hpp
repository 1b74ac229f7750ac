// SPDX-License-Identifier: Apache-2.0
// Embedding, blocks, head and loss in one: what a rank computes for its share of a micro-batch. One
// model for each micro-batch that is under way; they share their parameters.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "train/batch.hpp"
#include "train/layers/dense.hpp"
#include "train/layers/moe_block.hpp"

namespace weft::moe {

// This rank's part of the losses; the sum over the ranks is the loss of the global batch.
struct LossShare {
  std::vector<double> cross_entropy;  // [num_shards of this rank] nats per byte
  double balance = 0;                 // mean over the blocks

  // Adds the share of another micro-batch.
  LossShare& operator+=(const LossShare& other);
};

class Model {
 public:
  // `shards` of the tokens of this micro-batch; kept in one place, as blocks point to it.
  Model(MoeContext& context, Shards shards, const ModelLayout& layout, const ModelMemory& memory);

  // What the next forward and backward are of; must outlive them.
  void load(const Batch& batch) { batch_ = &batch; }

  // The pieces of a forward and backward, in their order, the blocks' own aside: these compute and
  // call nobody. All of them add to the gradients of cross_entropy + balance_weight * sum of the
  // blocks' balancing losses; step_model.hpp runs them.
  void pre_process();
  void post_process();
  void post_process_backward();
  void pre_process_backward();
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { context_->timer_of(lane).pause(); }

  // [num_tokens, hidden] what blocks read and write: tokens, from post_process_backward() on
  // gradients.
  [[nodiscard]] Matrix& x() { return x_; }
  [[nodiscard]] std::span<MoeBlock> blocks() { return blocks_; }
  [[nodiscard]] std::span<const MoeBlock> blocks() const { return blocks_; }
  // Results of the last forward.
  [[nodiscard]] LossShare share() const;

 private:
  MoeContext* context_;
  std::unique_ptr<const Shards> shards_;
  const Batch* batch_ = nullptr;
  Embedding embedding_;
  std::vector<MoeBlock> blocks_;
  Head head_;
  Matrix x_;
  Matrix logits_;
  std::vector<double> cross_entropy_;  // [num_shards of this rank]
};

}  // namespace weft::moe
