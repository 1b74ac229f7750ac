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

namespace weft::moe {

// From the last block to the loss, and back: norm, product, cross-entropy.
class DeviceHead {
 public:
  // For the tokens of one micro-batch, which outlive it. gain: [hidden]; weight: [kNumBytes,
  // hidden].
  DeviceHead(
      GpuRank& rank,
      const DeviceTokens& tokens,
      const DeviceParameter& gain,
      const DeviceParameter& weight
  );

  // What forward() is to find; [num_tokens] in host memory.
  void load_targets(std::span<const std::byte> targets);
  // Both queue their work on the stream of the compute lane. x [num_tokens, hidden]; backward
  // overwrites it.
  void forward(const float* x);
  void backward(float* grad_x);

  // The stream is through: fetches what loss() needs.
  void finish() { losses_.download(host_losses_, rank_->stream()); }
  // Of the last forward: this micro-batch's part of the mean over the global batch, in nats.
  [[nodiscard]] double loss() const;

 private:
  [[nodiscard]] float scale() const {
    return 1.0F / static_cast<float>(rank_->context().global_tokens);
  }

  GpuRank* rank_;
  const DeviceTokens* tokens_;
  DeviceNorm norm_;
  DeviceParameter weight_;
  DeviceArray<float> logits_;  // [num_tokens, kNumBytes]
  DeviceArray<uint16_t> grad_logits_;
  DeviceArray<uint8_t> targets_;  // [num_tokens]
  DeviceArray<float> losses_;     // [num_tokens]
  std::vector<float> host_losses_;
};

class DeviceMicroBatch {
 public:
  // Gradients that backward would overwrite are added to unless it is the first.
  DeviceMicroBatch(
      GpuRank& rank,
      int64_t num_tokens,
      const MicroBatchPlace& place,
      const ModelLayout& layout,
      const DeviceMemory& memory
  );

  // What the next forward and backward are of. The host's memory must outlive them.
  void load(const Batch& batch);
  // Collective, one piece after another; waits for the stream between them.
  void forward_backward();

  // The pieces of it, the blocks' own aside; each queues its work on the stream of the compute
  // lane.
  void pre_process();
  void post_process();
  void post_process_backward();
  void pre_process_backward();
  // Ends the phase that a piece on this lane has begun.
  void pause(overlap::Lane lane) { rank_->pause(lane); }

  // The streams are through: fetches what the losses need; they are there once they are through
  // again.
  void finish();
  [[nodiscard]] double cross_entropy() const { return head_.loss(); }
  [[nodiscard]] double balance() const;
  // The streams are through and no backward will come: gives back what the exchange lent.
  void release();

  // [num_tokens, hidden] tokens, from post_process_backward() on gradients.
  [[nodiscard]] DeviceArray<float>& x() { return x_; }
  [[nodiscard]] std::span<DeviceBlock> blocks() { return blocks_; }
  [[nodiscard]] std::span<const DeviceBlock> blocks() const { return blocks_; }

 private:
  [[nodiscard]] EmbeddingShape embedding() const;

  GpuRank* rank_;
  std::unique_ptr<DeviceTokens> tokens_;  // in one place: blocks point to it
  int64_t window_;
  DeviceParameter table_;
  DeviceHead head_;
  std::vector<DeviceBlock> blocks_;
  DeviceArray<uint8_t> windows_;  // [num_tokens, window]
  DeviceArray<float> x_;          // [num_tokens, hidden]
};

}  // namespace weft::moe
