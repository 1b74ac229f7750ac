// SPDX-License-Identifier: Apache-2.0
// The kernels of the benchmark itself: rows to send, and a common start. Next: gpu_cuda.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/half.hpp"
#include "core/hd.hpp"

namespace weft::program {

// Follows from where an element stands, so that a GPU can fill rows and the host can check a sample
// without holding them. A small number with few bits, so that sums differ if a term is missing: -4
// to 3.97.
WEFT_HD constexpr float row_element(uint64_t seed, int64_t row, int64_t col) {
  uint64_t bits = seed ^ (static_cast<uint64_t>(row) << 20U) ^ static_cast<uint64_t>(col);
  bits *= 0x9e3779b97f4a7c15U;
  bits ^= bits >> 29U;
  bits *= 0xbf58476d1ce4e5b9U;
  return static_cast<float>(static_cast<int>(bits >> 56U) - 128) / 32.0F;
}

// data[row, col] = row_element(seed, row, col) rounded to bf16.
void launch_fill(void* data, int64_t rows, int64_t cols, uint64_t seed, cudaStream_t stream);

// All ranks leave together: raises signals[rank] of every peer to `round`, waits until its own are.
// `regions` is PeerMemory::table(); bounded by 20 s, then it goes on.
void launch_barrier(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
);

}  // namespace weft::program
