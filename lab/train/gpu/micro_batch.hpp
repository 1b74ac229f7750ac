// SPDX-License-Identifier: Apache-2.0
// Model on a GPU: embedding, blocks, head and loss for one micro-batch. Those of a step share their
// parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "train/batch.hpp"
#include "train/gpu/block.hpp"
#include "train/gpu/device_array.hpp"
#include "train/gpu/kernels.hpp"
#include "train/gpu/rank.hpp"
#include "train/layers/dense.hpp"

namespace weft::moe {

class DeviceMicroBatch {
 public:
  // Gradients that backward would overwrite are added to unless it is the first of the step.
  DeviceMicroBatch(
      GpuRank& rank,
      int64_t num_tokens,
      bool is_first,
      bool is_last,
      const ModelLayout& layout,
      const DeviceMemory& memory
  );

  // What the next forward and backward are of. The host's memory must outlive them.
  void load(const Batch& batch);
  // The pieces of a forward and backward, the blocks' own aside; each queues its work on the stream
  // of the compute lane. step_model.hpp runs them.
  void pre_process();
  void post_process();
  void post_process_backward();
  void pre_process_backward();
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { rank_->pause(lane); }

  // The streams are through: fetches what the losses need; they are there once they are through
  // again.
  void finish();
  // Of the last forward: this micro-batch's part of the mean over the global batch, in nats.
  [[nodiscard]] double cross_entropy() const;
  [[nodiscard]] double balance() const;
  // The streams are through and no backward will come: gives back what the exchange lent.
  void release();

  // [num_tokens, hidden] tokens, from post_process_backward() on gradients.
  [[nodiscard]] DeviceArray<float>& x() { return x_; }
  [[nodiscard]] std::span<DeviceBlock> blocks() { return blocks_; }
  [[nodiscard]] std::span<const DeviceBlock> blocks() const { return blocks_; }

 private:
  [[nodiscard]] EmbeddingShape embedding() const;
  [[nodiscard]] ProductShape head_shape() const {
    return {tokens_->num_tokens, rank_->config().hidden, kNumBytes};
  }
  [[nodiscard]] float loss_scale() const {
    return 1.0F / static_cast<float>(rank_->context().global_tokens);
  }

  GpuRank* rank_;
  std::unique_ptr<DeviceTokens> tokens_;  // in one place: blocks point to it
  int64_t window_;
  DeviceParameter table_;
  std::vector<DeviceBlock> blocks_;
  DeviceNorm norm_;               // before the head
  DeviceParameter head_weight_;   // [kNumBytes, hidden]
  DeviceArray<uint8_t> windows_;  // [num_tokens, window]
  DeviceArray<uint8_t> targets_;  // [num_tokens]
  DeviceArray<float> x_;          // [num_tokens, hidden]
  DeviceArray<float> logits_;     // [num_tokens, kNumBytes]
  DeviceArray<uint16_t> grad_logits_;
  DeviceArray<float> losses_;  // [num_tokens]
  std::vector<float> host_losses_;
};

}  // namespace weft::moe
