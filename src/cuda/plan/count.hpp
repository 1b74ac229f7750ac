// SPDX-License-Identifier: Apache-2.0
// Launch of weft::count_routing on a GPU. count.cu has the kernel.
#pragma once

#include <cstdint>

namespace weft {

struct CountLaunch {
  const void* topk_idx = nullptr;  // [num_tokens, topk] of `index_bytes` bytes each
  int32_t index_bytes = 8;
  int32_t topk = 0;
  int64_t num_tokens = 0;
  int32_t num_experts = 0;
  int32_t num_ranks = 0;
  int32_t num_hosts = 1;
  const int64_t* host_of_rank = nullptr;  // [num_ranks]; only with per_host
  int32_t* per_rank = nullptr;            // [num_ranks]
  int32_t* per_host = nullptr;            // [num_hosts]; null: not wanted
  int32_t* per_expert = nullptr;          // [num_experts]
  bool* is_token_in_rank = nullptr;       // [num_tokens, num_ranks]
};

// `stream` is a cudaStream_t of this GPU. Both throw Error (kCuda, kUnsupported without CUDA).
void prepare_count_routing();  // once per device and before any capture
void launch_count_routing(const CountLaunch& call, int gpu, void* stream);

}  // namespace weft
