// SPDX-License-Identifier: Apache-2.0
// weft::spread_routing: on the CPU here, on a GPU by one launch (cuda/plan/spread.cu).
#include <algorithm>

#include "core/float_state.hpp"
#include "cuda/plan/spread.hpp"
#include "plan/build.hpp"
#include "weft/routing.hpp"

namespace weft {
namespace {

void check(const ConstTensor& topk_idx, const ConstTensor& weights, const SpreadRouting& out) {
  const Context nobody;
  const TensorCheck tensor{"spread_routing", nobody, topk_idx.device};
  if (topk_idx.cols != 0) {  // a token may have no choice at all
    tensor("topk_idx", topk_idx, {DType::kInt64, DType::kInt32});
  }
  tensor("map", out.map, {DType::kBool}, {topk_idx.rows, out.map.cols});
  if (out.weights.is_given() && topk_idx.cols != 0) {
    tensor("weights", weights, {DType::kFloat32}, {topk_idx.rows, topk_idx.cols});
    tensor("the weights' output", out.weights, {DType::kFloat32}, {out.map.rows, out.map.cols});
  }
}

SpreadLaunch launch_of(
    const ConstTensor& topk_idx, const ConstTensor& weights, const SpreadRouting& out
) {
  return {
      .topk_idx = topk_idx.data,
      .index_bytes = static_cast<int32_t>(dtype_bytes(topk_idx.dtype)),
      .num_experts = static_cast<int32_t>(out.map.cols),
      .topk = topk_idx.cols,
      .num_tokens = topk_idx.rows,
      .weights = reinterpret_cast<const float*>(weights.data),
      .map = reinterpret_cast<uint8_t*>(out.map.data),
      .spread = reinterpret_cast<float*>(out.weights.data)};
}

void spread_on_cpu(const SpreadLaunch& call) {
  const StandardFloats floats;
  const int64_t size = call.num_tokens * call.num_experts;
  std::fill_n(call.map, size, uint8_t{0});
  if (call.spread != nullptr) {
    std::fill_n(call.spread, size, 0.0F);
  }
  for (int64_t at = 0; at < call.num_tokens * call.topk; ++at) {
    const int64_t expert = call.index_bytes == sizeof(int64_t)
                               ? static_cast<const int64_t*>(call.topk_idx)[at]
                               : static_cast<const int32_t*>(call.topk_idx)[at];
    if (expert < 0 || expert >= call.num_experts) {
      continue;
    }
    const int64_t place = at / call.topk * call.num_experts + expert;
    if (call.spread != nullptr) {  // a weight as it is, then sums in the order of the choices
      const float weight = call.weights[at];
      call.spread[place] = call.map[place] == 0 ? weight : call.spread[place] + weight;
    }
    call.map[place] = 1;
  }
}

}  // namespace

void spread_routing(
    const ConstTensor& topk_idx, const ConstTensor& weights, const SpreadRouting& out, void* stream
) {
  check(topk_idx, weights, out);
  const SpreadLaunch call = launch_of(topk_idx, weights, out);
  if (topk_idx.device.kind == Device::Kind::kCpu) {
    spread_on_cpu(call);
  } else if (topk_idx.rows > 0) {
    launch_spread_routing(call, topk_idx.device.index, stream);
  }
}

}  // namespace weft
