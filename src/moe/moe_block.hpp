// SPDX-License-Identifier: Apache-2.0
// One block of the model, x += MoE(norm(x)), and the place to see how the library is used: plan,
// dispatch, experts, combine. Backward of combine is dispatch and backward of dispatch is combine,
// by the same plan.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moe/balance.hpp"
#include "moe/experts.hpp"
#include "moe/matrix.hpp"
#include "moe/parameters.hpp"
#include "moe/phase_timer.hpp"
#include "moe/rmsnorm.hpp"
#include "moe/router.hpp"
#include "moe/traffic.hpp"
#include "weft/exchange.hpp"

namespace weft::moe {

// What the blocks of a rank share.
struct MoeContext {
  Exchange& exchange;
  const ModelConfig& config;
  DType dtype = DType::kFloat32;  // of the rows that travel
  int64_t global_tokens = 0;      // of all ranks in a step
  Shards shards = {};             // of this rank's tokens
  PhaseTimer timer = {};
  Traffic dispatch = {};
  Traffic combine = {};
};

class MoeBlock {
 public:
  MoeBlock(MoeContext& context, const BlockLayout& layout, const ModelMemory& memory);

  // Collective. x [num_tokens, hidden].
  void forward(Matrix& x);
  // Collective, after forward. In: the gradient for what forward left in x; out: for what it found.
  void backward(Matrix& grad_x);

  // Of the last forward.
  [[nodiscard]] const Router& router() const { return router_; }
  [[nodiscard]] const Plan& plan() const { return *plan_; }
  [[nodiscard]] double balance_share() const { return balance_.share; }

 private:
  [[nodiscard]] ExpertRows expert_rows();
  [[nodiscard]] Buffer dispatch(
      const Matrix& x, const ConstTensor& weights, const Tensor& row_weights
  );
  void combine(const Matrix& rows, const ConstTensor& row_grads, Matrix& x, const Tensor& grads);

  MoeContext* context_;
  RmsNorm norm_;
  Router router_;
  Experts experts_;

  // From forward to backward.
  Matrix normed_;
  std::optional<Plan> plan_;
  Buffer rows_;                     // [num_rows, hidden] as they arrived
  std::vector<float> row_weights_;  // [num_rows]
  BalanceLoss balance_;

  // Scratch.
  Matrix row_floats_;
  Matrix expert_out_;
  Matrix tokens_;
  std::vector<uint16_t> bits_;
};

}  // namespace weft::moe
