// SPDX-License-Identifier: Apache-2.0
// Chooses each token's experts: softmax over all of them in fp32, the `topk` most probable win, a
// tie goes to the lower index. With topk > 1 the weights are the winners' probabilities divided by
// their sum; with topk = 1 the weight is the probability itself, so that the router still learns.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/layers/matrix.hpp"

namespace weft::moe {

class Router {
 public:
  Router(Parameter weight, int num_experts, int topk)  // [num_experts, hidden]
      : weight_(weight), num_experts_(num_experts), topk_(topk) {}

  void forward(const Matrix& x, const Shards& shards);

  // x as in forward; grad_weights [num_tokens, topk]; grad_probs [num_experts] is the gradient that
  // the balancing loss adds to every token's probabilities. grad_x += the gradient for x.
  void backward(
      const Matrix& x,
      const Matrix& grad_weights,
      std::span<const float> grad_probs,
      Matrix& grad_x,
      const Shards& shards
  );

  [[nodiscard]] const std::vector<int32_t>& topk_idx() const { return topk_idx_; }
  [[nodiscard]] const Matrix& weights() const { return weights_; }  // [num_tokens, topk]
  [[nodiscard]] const Matrix& probs() const { return probs_; }      // [num_tokens, num_experts]

 private:
  void choose(int64_t token);

  Parameter weight_;
  int num_experts_;
  int topk_;
  Matrix probs_;
  Matrix weights_;
  std::vector<int32_t> topk_idx_;  // [num_tokens, topk]
  Matrix grad_logits_;
  Matrix grad_x_;
};

// The load-balancing loss of one block over the global batch: E * sum_e f_e * P_e, where f_e is the
// part of all routes that expert e gets and P_e its mean probability. 1 when even.
//
// f_e comes from the plan, which knows every rank's counts. P_e is linear in the tokens, so each
// rank adds its own tokens' share and the sum over the ranks is the loss, however many they are.
struct BalanceLoss {
  double share = 0;               // this rank's part of the loss
  std::vector<float> grad_probs;  // [num_experts] the same for each token
};

// probs [num_tokens, num_experts] of this rank; global_routes [num_experts] of all ranks.
[[nodiscard]] BalanceLoss balance_loss(
    const Matrix& probs, std::span<const int64_t> global_routes, int64_t global_tokens
);

}  // namespace weft::moe
