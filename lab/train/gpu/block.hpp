// SPDX-License-Identifier: Apache-2.0
// One block of the model on a GPU: moe_block.hpp with device memory. The same calls of the exchange
// in the same order, every tensor on the GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "train/gpu/device_array.hpp"
#include "train/gpu/experts.hpp"
#include "train/gpu/kernels.hpp"
#include "train/gpu/rank.hpp"

namespace weft::moe {

class DeviceBlock {
 public:
  // For the tokens of one micro-batch, which outlive it.
  DeviceBlock(
      GpuRank& rank, DeviceTokens& tokens, const BlockLayout& layout, const DeviceMemory& memory
  );

  // The pieces of forward and backward, as MoeBlock has them; each queues its work on the stream of
  // its lane. x [num_tokens, hidden]: tokens in the forward, their gradients in the backward.
  void pre_dispatch(const DeviceArray<float>& x);
  void moe_dispatch();
  void mlp();
  void moe_combine(DeviceArray<float>& x);
  void moe_combine_backward(const DeviceArray<float>& grad_x);
  void mlp_backward();
  void mlp_weight_gradient();
  void moe_dispatch_backward();
  void pre_dispatch_backward(DeviceArray<float>& grad_x);

  // The streams are through: fetches what balance_share() needs.
  void finish();
  // The streams are through and no backward will come.
  void release() { rows_ = {}; }

  // Results of the last forward; all but the plan are there once the stream is through.
  [[nodiscard]] const Plan& plan() const { return plan_->plan; }
  [[nodiscard]] double balance_share() const;
  [[nodiscard]] std::span<const int32_t> topk_idx() {
    rank_->enter();
    host_topk_idx_.resize(plan_ ? topk_idx_.size() : 0);
    topk_idx_.download(host_topk_idx_, rank_->stream());
    rank_->synchronize();
    return host_topk_idx_;
  }

 private:
  [[nodiscard]] RouterShape router();
  [[nodiscard]] DeviceExperts::Rows expert_rows() const;
  [[nodiscard]] const uint16_t* grad_rows() const;
  [[nodiscard]] size_t num_rows() const { return static_cast<size_t>(plan().num_rows()); }
  void route();
  void balance();
  void route_backward();

  GpuRank* rank_;
  DeviceTokens* tokens_;
  DeviceNorm norm_;
  DeviceParameter router_weight_;  // [num_experts, hidden]
  DeviceExperts experts_;

  // What forward keeps for backward.
  DeviceArray<float> probs_;       // [num_tokens, num_experts]
  DeviceArray<int32_t> topk_idx_;  // [num_tokens, topk]
  DeviceArray<float> weights_;     // [num_tokens, topk]
  std::optional<CountedPlan> plan_;
  // [num_rows, hidden] as they arrived. Kept until the next ones come: by then no stream uses them.
  Buffer rows_;
  DeviceArray<float> row_weights_;  // [num_rows]
  DeviceArray<float> grad_probs_;   // [num_experts] of the balancing loss, weighted
  DeviceArray<float> prob_sums_;    // [num_experts] over the tokens

  // The same on the host.
  std::vector<float> balance_grads_;  // [num_experts] of the balancing loss
  std::vector<float> host_prob_grads_;
  std::vector<float> host_prob_sums_;
  std::vector<int32_t> host_topk_idx_;
};

}  // namespace weft::moe
