// SPDX-License-Identifier: Apache-2.0
// Balancing (plan/balance/balance.hpp) on a GPU, with the same results as on a CPU: placement and
// quotas from the counts of all ranks, and the physical experts of one rank's routes.
//
//   counts of all ranks: launch_swap_counts -> launch_plan_balance
//   this rank's routes: launch_count_routes, then launch_assign_routes -> plan of physical experts
//
// call.cpp makes a plan call of them.
//
// All memory is the caller's, on the GPU; nothing is allocated and nothing waits for the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "core/context.hpp"
#include "cuda/layout/launch.hpp"
#include "plan/balance/balance.hpp"

namespace weft {

// Returns the int32 words that call.cpp needs for plans with up to `largest.replicas` replicas.
[[nodiscard]] uint64_t balance_scratch_words(const PlanMap& largest);

inline constexpr int kMostBalancedRanks = 64;
inline constexpr int kAssignBlocks = 32;  // a guess: each of them reads the counts of those before

// The places of each expert in ascending order, as lists.
struct PlaceLists {
  int32_t* first = nullptr;  // [num_experts] a physical expert
  int32_t* next = nullptr;   // [shape.count()] of the same expert, -1: none
};

struct BalanceLaunch {
  PhysicalExperts shape;
  int32_t min_rows = 1;                // of a replica, at least 1
  int32_t block_rows = 1;              // as in Placement
  int64_t replica_rows = 0;            // as for pays_off()
  const int32_t* counts = nullptr;     // [num_ranks, num_experts] at least 0, below 2^31 together
  const int32_t* domain_of = nullptr;  // [num_ranks]; null: all ranks are in one domain
  const uint32_t* lost = nullptr;      // LocalState::lost, on the GPU; null: none
  // Arrays that it writes: Balance::replicas, Placement::rows and Balance::quotas.
  int32_t* replicas = nullptr;  // [num_ranks, shape.replicas]
  int32_t* rows = nullptr;      // [shape.count()]
  int32_t* quotas = nullptr;    // [num_ranks, shape.count()]
  PlaceLists places;
};

// One rank's routes, for both launches that read them.
struct AssignLaunch {
  PhysicalExperts shape;
  const void* topk_idx = nullptr;  // [num_tokens, topk] of `index_bytes` bytes each, -1: none
  int32_t index_bytes = 8;         // 4 or 8
  int32_t stride = 0;              // from one token's indices to the next one's, at least topk
  int32_t topk = 0;
  int64_t num_tokens = 0;
  int32_t source = 0;               // this rank
  const uint32_t* lost = nullptr;   // as of BalanceLaunch
  int32_t* block_counts = nullptr;  // [kAssignBlocks, num_experts] for the second from the first
  int32_t* counts = nullptr;        // [num_experts] routes to each, written by the first
  const int32_t* quotas = nullptr;  // [num_ranks, shape.count()]
  PlaceLists places;
  int32_t* physical = nullptr;  // [num_tokens, topk] written by the second
};

// Loads the kernels, once per device and before any capture.
void prepare_balance();
// Throws Error (kUnsupported) for more than kMostBalancedRanks ranks or where a block has too
// little shared memory.
void check_balance(const PhysicalExperts& shape, const Context& context = {});

// The launches throw Error (kCuda). An index that is neither -1 nor an expert, and a route that was
// not counted, become shape.count(), which is no physical expert: a plan refuses it. A route to an
// expert that lies on lost ranks only becomes -1.
// launch_count_routes() is for launch_assign_routes() of the same routes.
void launch_count_routes(const AssignLaunch& call, cudaStream_t stream);
// `placement`: [num_ranks, shape.replicas], on the host, where replicas lie anyway, among at most
// kMaxDomainRanks ranks; empty: they are planned.
void launch_plan_balance(
    const BalanceLaunch& call, std::span<const int32_t> placement, cudaStream_t stream
);
void launch_assign_routes(const AssignLaunch& call, cudaStream_t stream);

// Gathers all ranks' counts in `counts` [num_ranks, num_experts], zeroes if the call is given up.
// This first half of a collective call checks this rank's routing and the signature; launch_plan()
// with PlanLaunch::is_second is the other. `plan` is as for launch_plan() with
// PlanMap::of_chosen(); of the plan's block only the routes are written, and peers write nothing
// there.
void prepare_swap_counts();  // once per device and before any capture
void launch_swap_counts(const PlanLaunch& plan, int32_t* counts, cudaStream_t stream);

}  // namespace weft
