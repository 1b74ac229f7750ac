// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_kernels_cuda.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/peer_address.hpp"
#include "cuda/device/ptx/memory.cuh"

namespace weft::program {
namespace {

constexpr uint64_t kMostNanoseconds = 20'000'000'000;

__global__ void fill(uint16_t* data, int64_t rows, int64_t cols, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * cols;
       i += step) {
    data[i] = float_to_bf16(row_element(seed, i / cols, i % cols));
  }
}

__global__ void barrier(std::byte* const* regions, int rank, int num_ranks, uint32_t round) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= num_ranks) {
    return;
  }
  const auto signals_of = [&](int owner) {
    return reinterpret_cast<uint32_t*>(regions[static_cast<uint32_t>(owner) * kMaxPeerRegions]);
  };
  ptx::fence_sys();
  ptx::store_release_sys(signals_of(peer) + rank, round);
  const uint64_t begin = ptx::nanoseconds();
  while (static_cast<int32_t>(ptx::load_acquire_sys(signals_of(rank) + peer) - round) < 0) {
    if (ptx::nanoseconds() - begin > kMostNanoseconds) {
      return;
    }
  }
}

}  // namespace

void launch_fill(void* data, int64_t rows, int64_t cols, uint64_t seed, cudaStream_t stream) {
  fill<<<1024, 256, 0, stream>>>(static_cast<uint16_t*>(data), rows, cols, seed);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void launch_barrier(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
) {
  barrier<<<1, kMaxDomainRanks, 0, stream>>>(regions, rank, num_ranks, round);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft::program
