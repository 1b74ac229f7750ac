// SPDX-License-Identifier: Apache-2.0
// From the last block to the loss, and back, on a GPU: norm, product, cross-entropy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moe/device_memory_cuda.hpp"
#include "moe/gpu_rank_cuda.hpp"
#include "moe/kernels_cuda.hpp"

namespace weft::moe {

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
  DeviceParameter gain_;
  DeviceParameter weight_;
  DeviceArray<float> x_;
  DeviceArray<float> inverse_rms_;  // [num_tokens]
  DeviceArray<uint16_t> normed_;    // [num_tokens, hidden]
  DeviceArray<float> logits_;       // [num_tokens, kNumBytes]
  DeviceArray<uint16_t> grad_logits_;
  DeviceArray<uint8_t> targets_;  // [num_tokens]
  DeviceArray<float> losses_;     // [num_tokens]
  std::vector<float> host_losses_;
};

}  // namespace weft::moe
