// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/peer_address.hpp"
#include "cuda/device/ptx/bulk.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "measure/link_copies_cuda.hpp"

namespace weft::program {
namespace {

constexpr int kThreads = 1024;
constexpr int kInFlight = 8;  // loads of a thread
constexpr int64_t kUnit = int64_t{kThreads} * kInFlight * 16;
constexpr uint64_t kSecond = 1'000'000'000;

// This thread block's units, in turn: they go round all peers, so that any number of thread blocks
// shares the links evenly. Steps without divisions, which would cost more than a small copy.
class UnitWalk {
 public:
  __device__ UnitWalk(const LinkBlocks& blocks, int64_t unit_bytes)
      : num_peers_(blocks.num_blocks),
        peer_(static_cast<int>(blockIdx.x) % num_peers_),
        begin_(static_cast<int>(blockIdx.x) / num_peers_ * unit_bytes),
        unit_bytes_(unit_bytes),
        end_(blocks.bytes_each / unit_bytes * unit_bytes) {}

  [[nodiscard]] __device__ bool is_good() const { return begin_ < end_; }
  [[nodiscard]] __device__ int peer() const { return peer_; }
  [[nodiscard]] __device__ int64_t begin() const { return begin_; }
  __device__ void next() {
    peer_ += step_peers_;
    begin_ += step_bytes_;
    if (peer_ >= num_peers_) {
      peer_ -= num_peers_;
      begin_ += unit_bytes_;
    }
  }

 private:
  int num_peers_;
  int peer_;
  int64_t begin_;
  int64_t unit_bytes_;
  int64_t end_;
  int step_peers_ = static_cast<int>(gridDim.x) % num_peers_;
  int64_t step_bytes_ = static_cast<int>(gridDim.x) / num_peers_ * unit_bytes_;
};

__global__ void __launch_bounds__(kThreads) copy_words(const __grid_constant__ LinkBlocks blocks) {
  for (UnitWalk unit(blocks, kUnit); unit.is_good(); unit.next()) {
    const std::byte* from = blocks.from[unit.peer()] + unit.begin() + threadIdx.x * 16;
    std::byte* to = blocks.to[unit.peer()] + unit.begin() + threadIdx.x * 16;
    uint4 values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      values[i] = ptx::load_16(from + i * kThreads * 16);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      ptx::store_16(to + i * kThreads * 16, values[i]);
    }
  }
}

// One thread drives the copy engine: half of the stages load while the others store.
template <int kPiece, int kStages>
__global__ void copy_pieces(const __grid_constant__ LinkBlocks blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int kAhead = kStages / 2;
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ __align__(8) uint64_t full[kStages];
  if (threadIdx.x != 0) {
    return;
  }
  for (uint64_t& barrier : full) {
    ptx::init_barrier(&barrier);
  }
  ptx::publish_barriers();
  UnitWalk loaded(blocks, kPiece);
  int load_stage = 0;
  const auto load = [&] {
    ptx::bulk_load(
        stages + load_stage * kPiece,
        blocks.from[loaded.peer()] + loaded.begin(),
        kPiece,
        full + load_stage
    );
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
    loaded.next();
  };
  for (int i = 0; i < kAhead && loaded.is_good(); ++i) {
    load();
  }
  int stage = 0;
  uint32_t parity = 0;
  for (UnitWalk stored(blocks, kPiece); stored.is_good(); stored.next()) {
    while (!ptx::try_wait_barrier(full + stage, parity)) {
    }
    std::byte* to = blocks.to[stored.peer()] + stored.begin();
    ptx::bulk_store(to, stages + stage * kPiece, kPiece);
    ptx::commit_stores();
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
    if (loaded.is_good()) {
      ptx::wait_stores_read<kStages - kAhead>();
      load();
    }
  }
  ptx::wait_stores<0>();
#endif
}

template <int kPiece, int kStages>
int64_t launch_pieces(const LinkBlocks& blocks, int sms, cudaStream_t stream) {
  auto* kernel = copy_pieces<kPiece, kStages>;
  constexpr int kBytes = kPiece * kStages;
  // A failure is the caller's next cudaGetLastError().
  static_cast<void>(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)
  );
  kernel<<<static_cast<unsigned>(sms), 32, kBytes, stream>>>(blocks);
  return blocks.bytes_each % kPiece;
}

__device__ bool wait_for(const uint32_t* mine, uint32_t wanted, uint64_t deadline) {
  while (ptx::load_acquire_sys(mine) < wanted) {
    if (ptx::nanoseconds() > deadline) {
      return false;
    }
  }
  return true;
}

__global__ void signals(
    uint32_t* theirs, uint32_t* mine, uint32_t begin, uint32_t count, bool is_first
) {
  const uint64_t deadline = ptx::nanoseconds() + kSecond;
  for (uint32_t i = begin + 1; i <= begin + count; ++i) {
    if (is_first) {
      ptx::store_release_sys(theirs, i);
    }
    if (!wait_for(mine, i, deadline)) {
      return;
    }
    if (!is_first) {
      ptx::store_release_sys(theirs, i);
    }
  }
}

__global__ void meet(std::byte* const* regions, int rank, int num_ranks, uint32_t round) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < num_ranks) {
    const auto signals_of = [&](int owner) {
      return reinterpret_cast<uint32_t*>(regions[static_cast<uint32_t>(owner) * kMaxPeerRegions]);
    };
    ptx::fence_sys();
    ptx::store_release_sys(signals_of(peer) + rank, round);
    wait_for(signals_of(rank) + peer, round, ptx::nanoseconds() + 20 * kSecond);
  }
}

__global__ void hold(const volatile uint32_t* gate, uint32_t wanted) {
  const uint64_t start = ptx::nanoseconds();
  while (*gate < wanted && ptx::nanoseconds() - start < kSecond) {
  }
}

}  // namespace

int64_t copy_by_words(const LinkBlocks& blocks, int sms, cudaStream_t stream) {
  copy_words<<<static_cast<unsigned>(sms), kThreads, 0, stream>>>(blocks);
  return blocks.bytes_each % kUnit;
}

int64_t copy_by_small_pieces(const LinkBlocks& blocks, int sms, cudaStream_t stream) {
  return launch_pieces<4096, 40>(blocks, sms, stream);
}

int64_t copy_by_large_pieces(const LinkBlocks& blocks, int sms, cudaStream_t stream) {
  return launch_pieces<14336, 12>(blocks, sms, stream);
}

void exchange_signals(
    uint32_t* theirs,
    uint32_t* mine,
    uint32_t begin,
    uint32_t count,
    bool is_first,
    cudaStream_t stream
) {
  signals<<<1, 1, 0, stream>>>(theirs, mine, begin, count, is_first);
}

void meet_peers(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
) {
  meet<<<1, kMaxDomainRanks, 0, stream>>>(regions, rank, num_ranks, round);
}

void hold_stream(const uint32_t* gate, uint32_t wanted, cudaStream_t stream) {
  hold<<<1, 1, 0, stream>>>(gate, wanted);
}

}  // namespace weft::program
