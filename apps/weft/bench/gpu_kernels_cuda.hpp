// SPDX-License-Identifier: Apache-2.0
// The benchmark's own kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "weft/tensor.hpp"

namespace weft::program {

// data[row, col] = row_element(seed, row, col) rounded to bf16.
void launch_fill(void* data, int64_t rows, int64_t cols, uint64_t seed, cudaStream_t stream);

// All ranks leave together: raises signals[rank] of every peer to `round`, waits until its own are.
// `regions` is PeerMemory::table(); bounded by 20 s, then it goes on.
void launch_barrier(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
);

}  // namespace weft::program
