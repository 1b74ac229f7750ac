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
  // gain: [hidden]; weight: [kNumBytes, hidden].
  DeviceHead(GpuRank& rank, const DeviceParameter& gain, const DeviceParameter& weight);

  // x [num_tokens, hidden] becomes its gradient. Returns this rank's part of the mean over the
  // global batch, in nats.
  double forward_backward(float* x, std::span<const std::byte> targets);

 private:
  void backward(float* x);

  GpuRank* rank_;
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
