// SPDX-License-Identifier: Apache-2.0
// One block of the model on a GPU: moe_block.hpp with device memory. The same calls of the exchange
// in the same order, every tensor on the GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "moe/device_memory_cuda.hpp"
#include "moe/experts_cuda.hpp"
#include "moe/gpu_rank_cuda.hpp"
#include "moe/kernels_cuda.hpp"

namespace weft::moe {

class DeviceBlock {
 public:
  DeviceBlock(GpuRank& rank, const BlockLayout& layout, const DeviceMemory& memory);

  // Collective. x [num_tokens, hidden].
  void forward(float* x);
  // Collective, after forward. In: the gradient for what forward left in x; out: for what it found.
  void backward(float* grad_x);

  // Of the last forward; all but the plan once the stream is through.
  [[nodiscard]] const Plan& plan() const { return plan_->plan; }
  [[nodiscard]] double balance_share() const;
  [[nodiscard]] std::span<const int32_t> topk_idx();
  [[nodiscard]] std::span<const float> weights();

 private:
  [[nodiscard]] NormShape norm();
  [[nodiscard]] RouterShape router();
  [[nodiscard]] DeviceExpertRows expert_rows() const;
  void route();
  void balance();
  void route_backward();

  GpuRank* rank_;
  DeviceParameter gain_;           // [hidden]
  DeviceParameter router_weight_;  // [num_experts, hidden]
  DeviceExperts experts_;

  // From forward to backward.
  DeviceArray<float> x_;            // [num_tokens, hidden] as forward found it
  DeviceArray<float> inverse_rms_;  // [num_tokens]
  DeviceArray<uint16_t> normed_;    // [num_tokens, hidden]
  DeviceArray<float> probs_;        // [num_tokens, num_experts]
  DeviceArray<int32_t> topk_idx_;   // [num_tokens, topk]
  DeviceArray<float> weights_;      // [num_tokens, topk]
  std::optional<CountedPlan> plan_;
  Buffer rows_;                     // [num_rows, hidden] as they arrived
  DeviceArray<float> row_weights_;  // [num_rows]
  DeviceArray<float> grad_probs_;   // [num_experts] of the balancing loss, weighted
  DeviceArray<float> prob_sums_;    // [num_experts] over the tokens

  // The same on the host.
  std::vector<float> balance_grads_;  // [num_experts] of the balancing loss
  std::vector<float> host_prob_grads_;
  std::vector<float> host_prob_sums_;
  std::vector<int32_t> host_topk_idx_;
  std::vector<float> host_weights_;
};

}  // namespace weft::moe
