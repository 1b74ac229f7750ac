// SPDX-License-Identifier: Apache-2.0
// Counts a routing by topk_idx in one launch without memory of its own: each block reads all
// choices, but counts only its share of the experts, ranks and hosts, in shared memory, and marks
// the ranks of its share of the tokens. A thread has one token at a time. Before:
// exchange/count_routing.cpp; after: the caller.
#include "cuda/device/kernel.cuh"
#include "cuda/plan/count.hpp"

namespace weft {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocks = 32;  // a guess: more of them read more, fewer have more to mark each

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

// Whether no choice before k has the same one.
template <class Of>
__device__ bool is_first(int k, int64_t one, const Of& of) {
  for (int before = 0; before < k; ++before) {
    if (of(before) == one) {
      return false;
    }
  }
  return true;
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
  for (int64_t token = threadIdx.x; token < call.num_tokens; token += kThreads) {
    const TokenRoutes<Index> routes(call, token);
    for (int k = 0; k < call.topk; ++k) {
      const int64_t expert = routes.expert(k);
      const int64_t rank = routes.rank(k);
      if (experts.has(expert)) {
        atomicAdd(counts + (expert - experts.first), 1);
      }
      const auto rank_of = [&](int other) { return routes.rank(other); };
      if (ranks.has(rank) && is_first(k, rank, rank_of)) {
        atomicAdd(of_ranks + (rank - ranks.first), 1);
      }
      if (hosts.size() > 0) {
        const int64_t host = routes.host(k);
        const auto host_of = [&](int other) { return routes.host(other); };
        if (hosts.has(host) && is_first(k, host, host_of)) {
          atomicAdd(of_hosts + (host - hosts.first), 1);
        }
      }
    }
  }
  for (int64_t token = tokens.first + threadIdx.x; token < tokens.last; token += kThreads) {
    const TokenRoutes<Index> routes(call, token);
    bool* const marks = call.is_token_in_rank + token * call.num_ranks;
    for (int rank = 0; rank < call.num_ranks; ++rank) {
      marks[rank] = false;
    }
    for (int k = 0; k < call.topk; ++k) {
      if (routes.rank(k) >= 0) {
        marks[routes.rank(k)] = true;
      }
    }
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
