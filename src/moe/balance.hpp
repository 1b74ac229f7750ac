// SPDX-License-Identifier: Apache-2.0
// The load-balancing loss of one block over the global batch: E * sum_e f_e * P_e, where f_e is the
// part of all routes that expert e gets and P_e its mean probability. 1 when even.
//
// f_e comes from the plan, which knows every rank's counts. P_e is linear in the tokens, so each
// rank adds its own tokens' share and the sum over the ranks is the loss, however many they are.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/matrix.hpp"

namespace weft::moe {

struct BalanceLoss {
  double share = 0;               // this rank's part of the loss
  std::vector<float> grad_probs;  // [num_experts] the same for each token
};

// probs [num_tokens, num_experts] of this rank; global_routes [num_experts] of all ranks.
[[nodiscard]] BalanceLoss balance_loss(
    const Matrix& probs, std::span<const int64_t> global_routes, int64_t global_tokens
);

}  // namespace weft::moe
