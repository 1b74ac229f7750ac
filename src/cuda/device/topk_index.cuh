// SPDX-License-Identifier: Apache-2.0
// Reads a router's expert indices as the caller passed them, of 4 or 8 bytes each.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// Expert of route token * topk + k; not checked.
__device__ __forceinline__ int64_t
given_expert(const void* topk_idx, int32_t index_bytes, size_t route) {
  return index_bytes == sizeof(int64_t) ? __ldg(static_cast<const long long*>(topk_idx) + route)
                                        : __ldg(static_cast<const int*>(topk_idx) + route);
}

}  // namespace weft
