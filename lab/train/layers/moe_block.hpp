// SPDX-License-Identifier: Apache-2.0
// One block of the model, x += MoE(norm(x)), and the place to see how the library is used: plan,
// dispatch, experts, combine. Backward of combine is dispatch and backward of dispatch is combine,
// by the same plan.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "train/layers/dense.hpp"
#include "train/layers/experts.hpp"
#include "train/layers/matrix.hpp"
#include "train/layers/parameters.hpp"
#include "train/layers/router.hpp"
#include "train/phase_timer.hpp"
#include "weft/exchange.hpp"
#include "weft/overlap.hpp"

namespace weft::moe {

// What the blocks of a rank share, those of all micro-batches included.
struct MoeContext {
  Exchange& exchange;
  const ModelConfig& config;
  DType dtype = DType::kFloat32;  // of the rows that travel
  int64_t global_tokens = 0;      // of all ranks in a step
  bool has_two_lanes = false;     // exchanges run at the same time as computation
  PhaseTimer timer = {};
  PhaseTimer exchange_timer = {};  // of the second lane
  Traffic dispatch = {};           // written by the lane that calls the exchange
  Traffic combine = {};

  [[nodiscard]] PhaseTimer& timer_of(overlap::Lane lane) {
    return has_two_lanes && lane == overlap::Lane::kExchange ? exchange_timer : timer;
  }
};

class MoeBlock {
 public:
  // `shards` of the tokens that this block meets; they outlive it.
  MoeBlock(
      MoeContext& context,
      const Shards& shards,
      const BlockLayout& layout,
      const ModelMemory& memory
  );

  // The pieces of forward and backward, in their order, each named for the node of a layer that it
  // is in a schedule. Only those that move tokens call the exchange, and are collective. x, grad_x
  // [num_tokens, hidden].
  void pre_dispatch(const Matrix& x);
  void moe_dispatch();
  void mlp();
  void moe_combine(Matrix& x);
  void moe_combine_backward(const Matrix& grad_x);
  void mlp_backward();
  void mlp_weight_gradient();  // any time between its neighbours and the next mlp_backward()
  void moe_dispatch_backward();
  void pre_dispatch_backward(Matrix& grad_x);

  // Gives back the rows and the gradients that arrived. From any thread.
  void release() {
    rows_ = {};
    grad_rows_ = {};
  }

  // Results of the last forward.
  [[nodiscard]] const Router& router() const { return router_; }
  [[nodiscard]] const Plan& plan() const { return *plan_; }
  [[nodiscard]] std::span<const int32_t> topk_idx() const { return router_.topk_idx(); }
  [[nodiscard]] double balance_share() const { return balance_.share; }

 private:
  void start(overlap::Lane lane, Phase phase) { context_->timer_of(lane).start(phase); }
  [[nodiscard]] Buffer dispatch(
      const Matrix& x, const ConstTensor& weights, const Tensor& row_weights
  );
  void combine(const ConstTensor& row_grads, const Tensor& grads);

  MoeContext* context_;
  const Shards* shards_;
  RmsNorm norm_;
  Router router_;
  HostExperts experts_;

  // What forward keeps for backward.
  Matrix normed_;
  std::optional<Plan> plan_;
  Buffer rows_;                     // [num_rows, hidden] as they arrived
  std::vector<float> row_weights_;  // [num_rows]
  HostExperts::Rows expert_rows_;   // both, in fp32
  Matrix row_floats_;
  BalanceLoss balance_;

  // What one piece keeps for the next ones.
  Matrix expert_out_;                    // [num_rows, hidden] what experts made: rows or gradients
  Matrix tokens_;                        // [num_tokens, hidden] what came back
  Buffer grad_rows_;                     // [num_rows, hidden] gradients as they arrived
  const float* expert_grads_ = nullptr;  // the same in fp32
  Matrix grad_floats_;
  std::vector<float> grad_row_weights_;  // [num_rows]
  Matrix grad_weights_;                  // [num_tokens, topk]
  std::vector<uint16_t> bits_;           // scratch of the lane that calls the exchange
};

}  // namespace weft::moe
