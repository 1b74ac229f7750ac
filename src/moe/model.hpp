// SPDX-License-Identifier: Apache-2.0
// Embedding, blocks, head and loss in one: what a rank computes for its share of a batch.
#pragma once

#include <span>
#include <vector>

#include "moe/batch.hpp"
#include "moe/embedding.hpp"
#include "moe/head.hpp"
#include "moe/moe_block.hpp"

namespace weft::moe {

// This rank's part of the losses; the sum over the ranks is the loss of the global batch.
struct LossShare {
  std::vector<double> cross_entropy;  // [num_shards of this rank] nats per byte
  double balance = 0;                 // mean over the blocks
};

class Model {
 public:
  Model(MoeContext& context, const ModelLayout& layout, const ModelMemory& memory);

  // Collective. Adds to the gradients of cross_entropy + balance_weight * sum of the blocks'
  // balancing losses.
  LossShare forward_backward(const Batch& batch);

  [[nodiscard]] std::span<const MoeBlock> blocks() const { return blocks_; }

 private:
  MoeContext* context_;
  Embedding embedding_;
  std::vector<MoeBlock> blocks_;
  Head head_;
  Matrix x_;
  Matrix logits_;
};

}  // namespace weft::moe
