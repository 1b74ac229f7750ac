// SPDX-License-Identifier: Apache-2.0
// Launch of weft::spread_routing on a GPU. spread.cu has the kernel.
#pragma once

#include <cstdint>

namespace weft {

struct SpreadLaunch {
  const void* topk_idx = nullptr;  // [num_tokens, topk] of `index_bytes` bytes each
  int32_t index_bytes = 8;
  int32_t num_experts = 0;
  int64_t topk = 0;
  int64_t num_tokens = 0;
  const float* weights = nullptr;  // like topk_idx; null: none
  uint8_t* map = nullptr;          // [num_tokens, num_experts]
  float* spread = nullptr;         // likewise; null: not wanted
};

// `stream` is a cudaStream_t of this GPU. Both throw Error (kCuda, kUnsupported without CUDA).
void prepare_spread_routing();  // once per device and before any capture
void launch_spread_routing(const SpreadLaunch& call, int gpu, void* stream);

}  // namespace weft
