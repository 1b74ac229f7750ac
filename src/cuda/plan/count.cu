// SPDX-License-Identifier: Apache-2.0
// Counts a routing by topk_idx in one launch without memory of its own: each block of a cluster
// counts its share of the tokens' choices, in shared memory, and marks the tokens' ranks; then the
// blocks add up all counts. GPUs before Hopper have no clusters: one block does it all. Before:
// exchange/count_routing.cpp; after: the caller.
#include <cooperative_groups.h>

#include "cuda/device/kernel.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/plan/count.hpp"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WEFT_COUNTING_CLUSTER __cluster_dims__(weft::kBlocks)
#else
#define WEFT_COUNTING_CLUSTER
#endif

namespace weft {

constexpr int kBlocks = 8;  // as many as a cluster has everywhere

namespace {

constexpr int kThreads = 1024;
constexpr int kAhead = 8;              // choices that a thread reads at a time; a guess
constexpr int64_t kBits = 64;          // ranks, or hosts, that a thread looks at together
constexpr int64_t kMostCounts = 4096;  // of experts, ranks or hosts at a time: 16 KB

// The blocks that count together.
class Blocks {
 public:
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  static constexpr int kCount = kBlocks;

  static __device__ void sync() {
    cooperative_groups::this_cluster().sync();
  }
  // Returns the sum, over all blocks, of what lies at the same place of shared memory.
  static __device__ int32_t sum(int32_t* counted) {
    int32_t sum = 0;
#pragma unroll
    for (unsigned block = 0; block < kCount; ++block) {
      sum += *cooperative_groups::this_cluster().map_shared_rank(counted, block);
    }
    return sum;
  }
#else
  static constexpr int kCount = 1;

  static __device__ void sync() {
    __syncthreads();
  }
  static __device__ int32_t sum(const int32_t* counted) {
    return *counted;
  }
#endif
};

// A block's share of the numbers 0 .. total - 1.
struct Share {
  int64_t first;
  int64_t last;

  __device__ explicit Share(int64_t total)
      : first(total * blockIdx.x / Blocks::kCount),
        last(total * (blockIdx.x + 1) / Blocks::kCount) {}
};

template <class Index>
class TokenRoutes {
 public:
  __device__ TokenRoutes(const CountLaunch& call, int64_t token)
      : call_(call),
        idx_(static_cast<const Index*>(call.topk_idx) + token * call.topk),
        experts_per_rank_(static_cast<uint32_t>(call.num_experts / call.num_ranks)) {}

  // Return -1 for a choice that is none.
  [[nodiscard]] __device__ int64_t expert(int k) const {
    const auto expert = static_cast<int64_t>(idx_[k]);
    return expert >= 0 && expert < call_.num_experts ? expert : -1;
  }
  [[nodiscard]] __device__ int64_t rank(int k) const {
    const int64_t chosen = expert(k);
    const auto owner = static_cast<int64_t>(static_cast<uint32_t>(chosen) / experts_per_rank_);
    return chosen < 0 ? -1 : owner;
  }
  [[nodiscard]] __device__ int64_t host(int k) const {
    const int64_t chosen = rank(k);
    return chosen < 0 ? -1 : call_.host_of_rank[chosen];
  }

 private:
  const CountLaunch& call_;
  const Index* idx_;
  uint32_t experts_per_rank_;
};

// Returns a mask of the numbers first .. first + 63: bit i is 1 if a choice of the token has the
// i-th.
template <class Of>
__device__ uint64_t bits_of(int topk, int64_t first, const Of& of) {
  uint64_t bits = 0;
#pragma unroll 8
  for (int k = 0; k < topk; ++k) {
    const int64_t bit = of(k) - first;
    bits |= bit >= 0 && bit < kBits ? uint64_t{1} << bit : 0;
  }
  return bits;
}

// Counts `total` numbers, by all threads of all blocks: count(first, last, counts) adds to counts[i
// - first] how often this block has number i.
template <class Count>
__device__ void count_all(int64_t total, int32_t* out, const Count& count) {
  __shared__ int32_t counts[kMostCounts];
  for (int64_t first = 0; first < total; first += kMostCounts) {
    const int64_t here = min(total - first, kMostCounts);
    for (int64_t i = threadIdx.x; i < here; i += kThreads) {
      counts[i] = 0;
    }
    __syncthreads();
    count(first, first + here, counts);
    Blocks::sync();
    const Share share(here);
    for (int64_t i = share.first + threadIdx.x; i < share.last; i += kThreads) {
      out[first + i] = Blocks::sum(counts + i);
    }
    Blocks::sync();  // no block reads them any more
  }
}

// Counts choices by expert. A thread reads several at a time, its neighbours those beside them.
template <class Index>
__device__ void count_choices(const CountLaunch& call, const Share& tokens) {
  count_all(call.num_experts, call.per_expert, [&](int64_t first, int64_t last, int32_t* counts) {
    const auto* idx = static_cast<const Index*>(call.topk_idx);
    const int64_t end = tokens.last * call.topk;
    for (int64_t at = tokens.first * call.topk + threadIdx.x; at < end; at += kAhead * kThreads) {
      int64_t chosen[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t choice = at + i * kThreads;
        chosen[i] = choice < end ? static_cast<int64_t>(idx[choice]) : -1;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (chosen[i] >= first && chosen[i] < last) {
          atomicAdd(counts + (chosen[i] - first), 1);
        }
      }
    }
  });
}

// Counts the tokens that go to each of `total` ranks, or hosts. of(token's routes, k) is the rank
// or host of a choice, -1 for none; see(token, first, bits) is told which of the numbers first ..
// first + 63 a token has.
template <class Index, class Of, class See>
__device__ void count_tokens(
    const CountLaunch& call,
    const Share& tokens,
    int64_t total,
    int32_t* out,
    const Of& of,
    const See& see
) {
  count_all(total, out, [&](int64_t begin, int64_t end, int32_t* counts) {
    for (int64_t first = begin; first < end; first += kBits) {
      const auto num_bits = static_cast<int>(min(end - first, kBits));
      for (int64_t base = tokens.first; base < tokens.last; base += kThreads) {
        const int64_t token = base + threadIdx.x;
        uint64_t bits = 0;
        if (token < tokens.last) {
          const TokenRoutes<Index> routes(call, token);
          bits = bits_of(call.topk, first, [&](int k) { return of(routes, k); });
          see(token, first, bits);
        }
        for (int bit = 0; bit < num_bits; ++bit) {
          const int num_here = __popc(__ballot_sync(kAllLanes, (bits >> bit & 1) != 0));
          if (num_here > 0 && lane_index() == 0) {
            atomicAdd(counts + (first + bit - begin), num_here);
          }
        }
      }
    }
  });
}

// Marks a token's ranks among first .. first + 63, as far as there are so many.
__device__ void mark_ranks(const CountLaunch& call, int64_t token, int64_t first, uint64_t bits) {
  constexpr int kInWord = 8;
  bool* const marks = call.is_token_in_rank + token * call.num_ranks + first;
  const auto num_bits = static_cast<int>(min(call.num_ranks - first, kBits));
  const bool is_aligned = reinterpret_cast<uintptr_t>(marks) % kInWord == 0;
  if (!is_aligned || call.num_ranks % kInWord != 0) {
    for (int bit = 0; bit < num_bits; ++bit) {
      marks[bit] = (bits >> bit & 1) != 0;
    }
    return;
  }
  for (int begin = 0; begin < num_bits; begin += kInWord) {
    uint64_t word = 0;
#pragma unroll
    for (int bit = 0; bit < kInWord; ++bit) {
      word |= (bits >> (begin + bit) & 1) << (8 * bit);
    }
    *reinterpret_cast<uint64_t*>(marks + begin) = word;
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads) WEFT_COUNTING_CLUSTER
    count_routing_kernel(const __grid_constant__ CountLaunch call) {
  if (blockIdx.x >= Blocks::kCount) {
    return;
  }
  using Routes = TokenRoutes<Index>;
  const Share tokens(call.num_tokens);
  count_choices<Index>(call, tokens);
  count_tokens<Index>(
      call,
      tokens,
      call.num_ranks,
      call.per_rank,
      [](const Routes& routes, int k) { return routes.rank(k); },
      [&](int64_t token, int64_t first, uint64_t bits) { mark_ranks(call, token, first, bits); }
  );
  count_tokens<Index>(
      call,
      tokens,
      call.per_host == nullptr ? 0 : call.num_hosts,
      call.per_host,
      [](const Routes& routes, int k) { return routes.host(k); },
      [](int64_t /*token*/, int64_t /*first*/, uint64_t /*bits*/) {}
  );
}

}  // namespace

void prepare_count_routing() {
  load(count_routing_kernel<int64_t>);
  load(count_routing_kernel<int32_t>);
}

void launch_count_routing(const CountLaunch& call, int gpu, void* stream) {
  const CudaDeviceGuard guard(gpu);
  Kernel<CountLaunch> kernel = {count_routing_kernel<int64_t>, kThreads};
  if (call.index_bytes == sizeof(int32_t)) {
    kernel.function = count_routing_kernel<int32_t>;
  }
  launch(kernel, kBlocks, call, static_cast<cudaStream_t>(stream));
}

}  // namespace weft
