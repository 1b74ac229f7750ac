// SPDX-License-Identifier: Apache-2.0
#include "moe/balance.hpp"

#include <numeric>

namespace weft::moe {

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
