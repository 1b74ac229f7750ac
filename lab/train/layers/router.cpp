// SPDX-License-Identifier: Apache-2.0
#include "train/layers/router.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

#include "train/layers/dense.hpp"
#include "train/layers/linear.hpp"

namespace weft::moe {

void Router::forward(const Matrix& x, const Shards& shards) {
  const int64_t num_tokens = x.rows();
  probs_.resize(num_tokens, num_experts_);
  weights_.resize(num_tokens, topk_);
  topk_idx_.resize(static_cast<size_t>(num_tokens * topk_));
  linear_forward(x, weight_, rows_of(probs_), shards);
  for (int64_t t = 0; t < num_tokens; ++t) {
    softmax_in_place({probs_.row(t), static_cast<size_t>(num_experts_)});
    choose(t);
  }
}

void Router::choose(int64_t token) {
  const float* probs = probs_.row(token);
  int32_t* chosen = topk_idx_.data() + token * topk_;
  float* weights = weights_.row(token);
  float sum = 0.0F;
  for (int k = 0; k < topk_; ++k) {
    int32_t best = -1;
    for (int32_t e = 0; e < num_experts_; ++e) {
      const bool is_taken = std::find(chosen, chosen + k, e) != chosen + k;
      if (!is_taken && (best < 0 || probs[e] > probs[best])) {
        best = e;
      }
    }
    chosen[k] = best;
    weights[k] = probs[best];
    sum += probs[best];
  }
  for (int k = 0; topk_ > 1 && k < topk_; ++k) {
    weights[k] /= sum;
  }
}

void Router::backward(
    const Matrix& x,
    const Matrix& grad_weights,
    std::span<const float> grad_probs,
    Matrix& grad_x,
    const Shards& shards
) {
  const int64_t num_tokens = x.rows();
  grad_logits_.resize(num_tokens, num_experts_);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const float* gw = grad_weights.row(t);
    const float* weights = weights_.row(t);
    const float* probs = probs_.row(t);
    const int32_t* chosen = topk_idx_.data() + t * topk_;
    float* grad = grad_logits_.row(t);
    std::ranges::copy(grad_probs, grad);

    float sum = 0.0F;
    float mean = 0.0F;  // of the weights' gradients: what the division by the sum takes away
    for (int k = 0; k < topk_; ++k) {
      sum += probs[chosen[k]];
      mean += gw[k] * weights[k];
    }
    for (int k = 0; k < topk_; ++k) {
      grad[chosen[k]] += topk_ > 1 ? (gw[k] - mean) / sum : gw[k];
    }
    softmax_backward_in_place(
        {probs, static_cast<size_t>(num_experts_)}, {grad, static_cast<size_t>(num_experts_)}
    );
  }
  grad_x_.resize(num_tokens, x.cols());
  linear_backward(grad_logits_, x, weight_, rows_of(grad_x_), shards);
  std::ranges::transform(grad_x_.span(), grad_x.span(), grad_x.data(), std::plus<>());
}

BalanceLoss balance_loss(
    const Matrix& probs, std::span<const int64_t> global_routes, int64_t global_tokens
) {
  const size_t num_experts = global_routes.size();
  const auto all_routes = std::accumulate(global_routes.begin(), global_routes.end(), int64_t{0});
  BalanceLoss result;
  result.grad_probs.resize(num_experts);
  for (size_t e = 0; e < num_experts; ++e) {
    const double part = static_cast<double>(global_routes[e]) / static_cast<double>(all_routes);
    const double grad =
        static_cast<double>(num_experts) * part / static_cast<double>(global_tokens);
    result.grad_probs[e] = static_cast<float>(grad);
    double sum = 0;
    for (int64_t t = 0; t < probs.rows(); ++t) {
      sum += static_cast<double>(probs.row(t)[e]);
    }
    result.share += grad * sum;
  }
  return result;
}

}  // namespace weft::moe
