// SPDX-License-Identifier: Apache-2.0
#include "bench/barrier_cuda.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/peer_address.hpp"
#include "cuda/device/ptx/memory.cuh"

namespace weft::program {
namespace {

constexpr uint64_t kMostNanoseconds = 20'000'000'000;

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

void launch_barrier(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
) {
  barrier<<<1, kMaxDomainRanks, 0, stream>>>(regions, rank, num_ranks, round);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft::program
