// SPDX-License-Identifier: Apache-2.0
// The weight with which a choice counts, by the experts that the caller names beside the weights,
// for sum.cuh and by_route.cu.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Returns `weight`, that of choice k of a token; 0 where the caller names no expert; NaN where the
// caller names another than the plan was made of; the first such choice of a call is told to the
// host.
__device__ __forceinline__ float counted_weight(
    const CombineLaunch& call, int64_t token, int k, float weight
) {
  if (call.source_idx == nullptr) {
    return weight;
  }
  const auto at = static_cast<size_t>(token) * static_cast<size_t>(call.topk) + k;
  const int64_t named = given_expert(call.source_idx, call.index_bytes, at);
  const int32_t physical = call.plan.route_expert()[token * call.plan.map.max_topk + k];
  if (named < 0 || named >= static_cast<int64_t>(call.me.map.num_experts)) {
    return 0.0F;
  }
  const int32_t chosen = physical < 0 ? -1 : call.plan.chosen_expert(physical);
  // A plan leaves out what goes to ranks that are lost.
  if (named == chosen || (chosen < 0 && lost_ranks(call.me) != 0)) [[likely]] {
    return weight;
  }
  const FaultRecord fault = {
      .kind = FaultKind::kOtherChoice,
      .op = Op::kCombine,
      .epoch = call.me.local->epoch + 1,
      .peer = call.me.rank,
      .what = k,
      .block = chosen,
      .seen = token,
      .wanted = named};
  tell_misuse(call.me, fault);
  return __int_as_float(0x7fffffff);
}

}  // namespace weft
