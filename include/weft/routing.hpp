// SPDX-License-Identifier: Apache-2.0
// What the router decided for this rank's tokens. Next in the data flow: plan.hpp.
#pragma once

#include "weft/tensor.hpp"

namespace weft {

inline constexpr int kMaxTopk = 32;

// Exactly one of `topk_idx` and `map` is given. T may differ between ranks and may be zero.
struct Routing {
  ConstTensor topk_idx =
      {};  // [num_tokens, topk] int64 or int32; -1 = no route; a repeated expert is two routes
  ConstTensor map =
      {};  // [num_tokens, num_experts] bool; at most ExchangeConfig::max_topk set in a row
  // Optional fp32 weights the plan keeps for CombineScale::kPlanWeights: [num_tokens, topk], or
  // [num_tokens, num_experts] with a map.
  ConstTensor weights = {};
  // Values of topk_idx outside [0, num_experts) are no route, like -1, and no error.
  bool ignores_unknown = false;
};

}  // namespace weft
