// SPDX-License-Identifier: Apache-2.0
// Kernels that give every row a warp: where a thread stands, and sums over its warp, in an order
// that is always the same.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/gpu/check.hpp"

namespace weft::moe {

inline constexpr int kLanes = 32;
inline constexpr int kRowThreads = 256;
inline constexpr int kRowsPerBlock = kRowThreads / kLanes;
inline constexpr int kFlatThreads = 256;

// The same for all lanes of a warp.
__device__ inline int64_t warp_row() {
  return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
}
__device__ inline int lane_id() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
__device__ inline int64_t flat_index() {
  return static_cast<int64_t>(blockIdx.x) * kFlatThreads + threadIdx.x;
}

// Every lane gets the result.
__device__ inline float warp_sum(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  return value;
}
__device__ inline float warp_max(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, offset));
  }
  return value;
}

inline unsigned num_blocks(int64_t size, int64_t per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 blocks, int threads, cudaStream_t stream, const Args&... args) {
  kernel<<<blocks, static_cast<unsigned>(threads), 0, stream>>>(args...);
  WEFT_CUDA(Context{}, cudaGetLastError());
}
// A warp for each row, or a thread for each element; nothing where there is none.
template <class Kernel, class... Args>
void launch_rows(Kernel kernel, int64_t rows, cudaStream_t stream, const Args&... args) {
  if (rows > 0) {
    launch(kernel, num_blocks(rows, kRowsPerBlock), kRowThreads, stream, args...);
  }
}
template <class Kernel, class... Args>
void launch_flat(Kernel kernel, int64_t size, cudaStream_t stream, const Args&... args) {
  if (size > 0) {
    launch(kernel, num_blocks(size, kFlatThreads), kFlatThreads, stream, args...);
  }
}

}  // namespace weft::moe
