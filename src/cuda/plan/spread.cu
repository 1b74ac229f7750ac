// SPDX-License-Identifier: Apache-2.0
// Makes a map, and weights by expert, of a routing by topk_idx in one launch. A warp has one token
// at a time: its lanes clear the token's rows, then each marks a choice. Before:
// exchange/spread_routing.cpp; after: the caller, who plans with the map.
#include <algorithm>

#include "cuda/device/kernel.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/plan/spread.hpp"

namespace weft {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int64_t kMostBlocks = 1024;  // a guess: enough for every GPU

// Zeroes a row, by one warp.
__device__ void clear(void* row, int64_t bytes, uint32_t lane) {
  if ((reinterpret_cast<uintptr_t>(row) | static_cast<uintptr_t>(bytes)) % sizeof(uint4) == 0) {
    auto* const out = static_cast<uint4*>(row);
    for (int64_t i = lane; i < bytes / static_cast<int64_t>(sizeof(uint4)); i += kWarpLanes) {
      out[i] = {};
    }
    return;
  }
  auto* const out = static_cast<uint8_t*>(row);
  for (int64_t i = lane; i < bytes; i += kWarpLanes) {
    out[i] = 0;
  }
}

// Adds to `sum`, by one warp, the weights of the lanes `others`, in their order, as a CPU does.
__device__ float sum_of_repeats(float sum, float weight, uint32_t others) {
  while (__any_sync(kAllLanes, static_cast<int>(others != 0)) != 0) {
    const int from = others != 0 ? __ffs(static_cast<int>(others)) - 1 : 0;
    const float next = __shfl_sync(kAllLanes, weight, from);
    sum = others != 0 ? __fadd_rn(sum, next) : sum;
    others &= others - 1;  // 0 stays 0
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    spread_routing_kernel(const __grid_constant__ SpreadLaunch call) {
  const auto lane = static_cast<uint32_t>(threadIdx.x) % kWarpLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  for (int64_t token = first; token < call.num_tokens;
       token += static_cast<int64_t>(gridDim.x) * kWarps) {
    uint8_t* const map = call.map + token * call.num_experts;
    float* const spread = call.spread == nullptr ? nullptr : call.spread + token * call.num_experts;
    clear(map, call.num_experts, lane);
    if (spread != nullptr) {
      clear(spread, call.num_experts * static_cast<int64_t>(sizeof(float)), lane);
    }
    __syncwarp();
    for (int64_t base = 0; base < call.topk; base += kWarpLanes) {
      const int64_t k = base + lane;
      const auto at = static_cast<size_t>(token * call.topk + k);
      const int64_t given = k < call.topk ? given_expert(call.topk_idx, call.index_bytes, at) : -1;
      const bool is_route = given >= 0 && given < call.num_experts;
      const int32_t expert = is_route ? static_cast<int32_t>(given) : -1;
      const uint32_t same = __match_any_sync(kAllLanes, expert);
      const bool is_first = is_route && (same & ((1U << lane) - 1)) == 0;
      if (spread != nullptr) {
        const float weight = is_route ? call.weights[at] : 0.0F;
        const bool has_begun = is_first && base > 0 && map[expert] != 0;
        const float sum = has_begun ? __fadd_rn(spread[expert], weight) : weight;
        const float all = sum_of_repeats(sum, weight, is_first ? same & ~(1U << lane) : 0);
        if (is_first) {
          spread[expert] = all;
        }
      }
      if (is_first) {
        map[expert] = 1;
      }
      __syncwarp();
    }
  }
}

}  // namespace

void prepare_spread_routing() {
  load(spread_routing_kernel);
}

void launch_spread_routing(const SpreadLaunch& call, int gpu, void* stream) {
  const CudaDeviceGuard guard(gpu);
  const int64_t blocks =
      std::clamp((call.num_tokens + kWarps - 1) / kWarps, int64_t{1}, kMostBlocks);
  const Kernel<SpreadLaunch> kernel = {spread_routing_kernel, kThreads};
  launch(kernel, static_cast<int>(blocks), call, static_cast<cudaStream_t>(stream));
}

}  // namespace weft
