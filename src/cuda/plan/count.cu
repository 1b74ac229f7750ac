// SPDX-License-Identifier: Apache-2.0
// Counts a routing by topk_idx in one launch without memory of its own: each block reads all
// choices, but counts only its share of the experts, ranks and hosts, in shared memory, and marks
// the ranks of its share of the tokens. Before: exchange/count_routing.cpp; after: the caller.
#include "cuda/device/kernel.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/plan/count.hpp"

namespace weft {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocks = 32;    // a guess: more of them read more, fewer have more to mark each
constexpr int kAhead = 8;      // choices that a thread reads at a time; a guess
constexpr int64_t kBits = 64;  // ranks, or hosts, that a thread looks at together

// Numbers first .. last of something, which this block has.
struct Share {
  int64_t first;
  int64_t last;

  __device__ explicit Share(int64_t total)
      : first(total * blockIdx.x / gridDim.x), last(total * (blockIdx.x + 1) / gridDim.x) {}
  [[nodiscard]] __device__ bool has(int64_t number) const {
    return number >= first && number < last;
  }
  [[nodiscard]] __device__ int64_t size() const { return last - first; }
};

template <class Index>
class TokenRoutes {
 public:
  __device__ TokenRoutes(const CountLaunch& call, int64_t token)
      : call_(call),
        idx_(static_cast<const Index*>(call.topk_idx) + token * call.topk),
        experts_per_rank_(static_cast<uint32_t>(call.num_experts / call.num_ranks)) {}

  // These are -1 for a choice that is none.
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

// Of the numbers first .. first + 63: bit i is 1 if a choice of the token has the i-th.
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

// All threads of a block: how many tokens go to each of the share's ranks, or hosts.
// of(token's routes, k) is the rank or host of a choice, -1 for none.
template <class Index, class Of>
__device__ void count_tokens(
    const CountLaunch& call, const Share& share, int32_t* counts, const Of& of
) {
  for (int64_t first = share.first; first < share.last; first += kBits) {
    const auto num_bits = static_cast<int>(min(share.last - first, kBits));
    for (int64_t begin = 0; begin < call.num_tokens; begin += kThreads) {
      const int64_t token = begin + threadIdx.x;
      uint64_t bits = 0;
      if (token < call.num_tokens) {
        const TokenRoutes<Index> routes(call, token);
        bits = bits_of(call.topk, first, [&](int k) { return of(routes, k); });
      }
      for (int bit = 0; bit < num_bits; ++bit) {
        const int num_here = __popc(__ballot_sync(kAllLanes, (bits >> bit & 1) != 0));
        if (num_here > 0 && lane_index() == 0) {
          atomicAdd(counts + (first + bit - share.first), num_here);
        }
      }
    }
  }
}

// All threads of a block. A thread reads several choices at a time, its neighbours those beside
// them.
template <class Index>
__device__ void count_choices(const CountLaunch& call, const Share& experts, int32_t* counts) {
  const auto* idx = static_cast<const Index*>(call.topk_idx);
  const int64_t total = call.num_tokens * call.topk;
  for (int64_t begin = threadIdx.x; begin < total; begin += kAhead * kThreads) {
    int64_t chosen[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t at = begin + i * kThreads;
      chosen[i] = at < total ? static_cast<int64_t>(idx[at]) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (experts.has(chosen[i])) {
        atomicAdd(counts + (chosen[i] - experts.first), 1);
      }
    }
  }
}

template <class Index>
__device__ void mark_ranks(const CountLaunch& call, int64_t token) {
  const TokenRoutes<Index> routes(call, token);
  bool* const marks = call.is_token_in_rank + token * call.num_ranks;
  for (int64_t first = 0; first < call.num_ranks; first += kBits) {
    const uint64_t bits = bits_of(call.topk, first, [&](int k) { return routes.rank(k); });
    const auto num_bits = static_cast<int>(min(call.num_ranks - first, kBits));
    for (int bit = 0; bit < num_bits; ++bit) {
      marks[first + bit] = (bits >> bit & 1) != 0;
    }
  }
}

// All threads of a block. `counts` [share.size()].
__device__ void store(const Share& share, const int32_t* counts, int32_t* out) {
  for (int64_t i = threadIdx.x; i < share.size(); i += kThreads) {
    out[share.first + i] = counts[i];
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads)
    count_routing_kernel(const __grid_constant__ CountLaunch call) {
  extern __shared__ int32_t counts[];
  const Share experts(call.num_experts);
  const Share ranks(call.num_ranks);
  const Share hosts(call.per_host == nullptr ? 0 : call.num_hosts);
  const Share tokens(call.num_tokens);
  int32_t* const of_ranks = counts + experts.size();
  int32_t* const of_hosts = of_ranks + ranks.size();
  for (int64_t i = threadIdx.x; i < experts.size() + ranks.size() + hosts.size(); i += kThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  count_choices<Index>(call, experts, counts);
  using Routes = TokenRoutes<Index>;
  count_tokens<Index>(call, ranks, of_ranks, [](const Routes& routes, int k) {
    return routes.rank(k);
  });
  count_tokens<Index>(call, hosts, of_hosts, [](const Routes& routes, int k) {
    return routes.host(k);
  });
  for (int64_t token = tokens.first + threadIdx.x; token < tokens.last; token += kThreads) {
    mark_ranks<Index>(call, token);
  }
  __syncthreads();
  store(experts, counts, call.per_expert);
  store(ranks, of_ranks, call.per_rank);
  store(hosts, of_hosts, call.per_host);
}

}  // namespace

void launch_count_routing(const CountLaunch& call, int gpu, void* stream) {
  const CudaDeviceGuard guard(gpu);
  const auto share = [](int32_t total) { return total / kBlocks + 1; };
  const int32_t counts = share(call.num_experts) + share(call.num_ranks) + share(call.num_hosts);
  Kernel<CountLaunch> kernel = {count_routing_kernel<int64_t>, kThreads};
  if (call.index_bytes == sizeof(int32_t)) {
    kernel.function = count_routing_kernel<int32_t>;
  }
  kernel.shared_bytes = counts * static_cast<int>(sizeof(int32_t));
  launch(kernel, kBlocks, call, static_cast<cudaStream_t>(stream));
}

}  // namespace weft
