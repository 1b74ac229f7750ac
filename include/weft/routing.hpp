// SPDX-License-Identifier: Apache-2.0
// Decisions of the router for this rank's tokens. Next in the data flow: plan.hpp.
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
  // True if topk_idx may name no expert: values outside [0, num_experts) are no route.
  bool ignores_unknown = false;
  // With a map, optional: the indices that it was made of (`spread_routing`), [num_tokens, any]
  // int64 or int32. Those outside [-1, num_experts) are refused, as of topk_idx.
  ConstTensor map_indices = {};
};

// Outputs of `count_routing`. A token counts once for a rank or a host, however many of its experts
// are there.
struct RoutingCounts {
  Tensor per_rank;                // int32 [1, num_ranks] tokens
  Tensor per_expert;              // int32 [1, num_experts] choices
  Tensor is_token_in_rank;        // bool [num_tokens, num_ranks]
  Tensor per_host = {};           // int32 [1, hosts] tokens; with
  ConstTensor host_of_rank = {};  // int64 [1, num_ranks], each from 0 and below `hosts`
};

// Local, no call of an exchange: counts topk_idx [num_tokens, up to kMaxTopk], int64 or int32,
// whose values outside [0, num_experts) are no choice. All memory is on one device; on a GPU this
// is one launch in `stream` (a cudaStream_t of that GPU) and does not wait. Throws Error
// (kInvalidArgument, kCuda).
void count_routing(
    const ConstTensor& topk_idx, int num_experts, const RoutingCounts& out, void* stream = nullptr
);

// Outputs of `spread_routing`.
struct SpreadRouting {
  Tensor map;           // bool [num_tokens, num_experts]
  Tensor weights = {};  // fp32 likewise; optional
};

// Local, no call of an exchange: makes the map of topk_idx [num_tokens, any], int64 or int32, and
// puts `weights` (fp32 like topk_idx; given with SpreadRouting::weights) in their experts' columns,
// 0 elsewhere. Values outside [0, map.cols) are skipped; weights of an expert that a token chose
// several times are added in the order of its choices. Memory and stream as for `count_routing`.
// Throws Error (kInvalidArgument, kCuda).
void spread_routing(
    const ConstTensor& topk_idx,
    const ConstTensor& weights,
    const SpreadRouting& out,
    void* stream = nullptr
);

}  // namespace weft
