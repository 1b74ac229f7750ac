// SPDX-License-Identifier: Apache-2.0
// A common start of all ranks' streams. Next: gpu_cuda.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::program {

// All ranks leave together: raises signals[rank] of every peer to `round`, waits until its own are.
// `regions` is PeerMemory::table(); bounded by 20 s, then it goes on.
void launch_barrier(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
);

}  // namespace weft::program
