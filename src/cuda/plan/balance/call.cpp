// SPDX-License-Identifier: Apache-2.0
// Queues what comes before the plan kernel where popular experts get replicas: the counts of all
// ranks, the replicas, and this rank's routes to physical experts. Nothing waits for the host.
// Previous in the data flow: the router; next: plan/plan.cu, as the call's second half.
#include <limits>

#include "cuda/exchange/exchange.hpp"
#include "cuda/plan/balance/launch.hpp"
#include "plan/balance/routing.hpp"

namespace weft {
namespace {

// The memory of a call, by int32 words.
struct BalanceMemory {
  int32_t* counts = nullptr;        // [num_ranks, num_experts] of all ranks
  int32_t* rows = nullptr;          // [shape.count()]
  int32_t* quotas = nullptr;        // [num_ranks, shape.count()]
  int32_t* first = nullptr;         // [num_experts] PlaceLists
  int32_t* next = nullptr;          // [shape.count()]
  int32_t* block_counts = nullptr;  // [kAssignBlocks, num_experts]
  int32_t* own_counts = nullptr;    // [num_experts]
  int32_t* physical = nullptr;      // [max_tokens, max_topk]
};

PhysicalExperts shape_of(const PlanMap& map) {
  return {
      static_cast<int>(map.num_ranks),
      static_cast<int>(map.of_chosen().num_experts),
      static_cast<int>(map.replicas)};
}

// Returns the words in all; a null `base` only counts.
uint64_t lay_out(const PlanMap& map, int32_t* base, BalanceMemory& memory) {
  const PhysicalExperts shape = shape_of(map);
  const auto experts = static_cast<uint64_t>(shape.num_experts);
  const auto places = static_cast<uint64_t>(shape.count());
  uint64_t end = 0;
  const auto take = [&](int32_t*& array, uint64_t words) {
    array = base == nullptr ? nullptr : base + end;
    end += words;
  };
  take(memory.counts, map.num_ranks * experts);
  take(memory.rows, places);
  take(memory.quotas, map.num_ranks * places);
  take(memory.first, experts);
  take(memory.next, places);
  take(memory.block_counts, kAssignBlocks * experts);
  take(memory.own_counts, experts);
  take(memory.physical, uint64_t{map.max_tokens} * map.max_topk);
  return end;
}

}  // namespace

uint64_t balance_scratch_words(const PlanMap& largest) {
  BalanceMemory memory;
  return lay_out(largest, nullptr, memory);
}

void CudaExchange::check_balance_of(const Balancing& balancing, int topk) {
  check_balancing(balancing, view_.num_ranks, settings_.num_experts, context_);
  const auto replicas = static_cast<uint32_t>(balancing.replicas);
  if (replicas == 0) {
    return;
  }
  constexpr int64_t kMostRoutes = std::numeric_limits<int32_t>::max();
  const int64_t routes = settings_.max_tokens * topk;
  WEFT_CHECK(
      context_,
      routes <= kMostRoutes / view_.num_ranks,
      ErrorCode::kUnsupported,
      "plan: balance of up to {} routes on each of {} ranks of GPUs (at most {} of all ranks)",
      routes,
      view_.num_ranks,
      kMostRoutes
  );
  if ((checked_replicas_ >> replicas & 1U) == 0) {
    const PlanMap map = plan_map(balancing.replicas);
    check_balance(shape_of(map), context_);
    weft::prepare_plan(map);
    checked_replicas_ |= 1U << replicas;
  }
}

void CudaExchange::queue_balance(
    const Balancing& balancing, PlanLaunch& launch, cudaStream_t stream
) {
  const PlanMap& map = launch.plan.map;
  BalanceMemory memory;
  lay_out(map, balance_scratch_.get(), memory);

  PlanLaunch first = launch;
  first.plan.map = map.of_chosen();
  first.host_shape = nullptr;
  first.keeps_lost = !balancing.placement.empty();
  launch_swap_counts(first, memory.counts, stream);

  BalanceLaunch balance;
  balance.shape = shape_of(map);
  balance.min_rows = static_cast<int32_t>(balancing.min_rows);
  balance.block_rows = static_cast<int32_t>(balancing.block_rows);
  balance.replica_rows = balancing.replica_rows;
  balance.counts = memory.counts;
  balance.lost = &view_.local->lost;
  balance.replicas = launch.plan.placement();
  balance.rows = memory.rows;
  balance.quotas = memory.quotas;
  balance.places = {memory.first, memory.next};
  launch_plan_balance(balance, balancing.placement, stream);

  AssignLaunch assign;
  assign.shape = balance.shape;
  assign.topk_idx = launch.plan.route_expert();  // as the first half has read them
  assign.index_bytes = sizeof(int32_t);
  assign.stride = static_cast<int32_t>(map.max_topk);
  assign.topk = launch.topk;
  assign.num_tokens = launch.num_tokens;
  assign.source = view_.rank;
  assign.lost = balance.lost;
  assign.block_counts = memory.block_counts;
  assign.counts = memory.own_counts;
  assign.quotas = memory.quotas;
  assign.places = balance.places;
  assign.physical = memory.physical;
  launch_count_routes(assign, stream);
  launch_assign_routes(assign, stream);

  launch.is_second = true;
  launch.topk_idx = memory.physical;
  launch.index_bytes = sizeof(int32_t);
  launch.map = nullptr;
  launch.weights = nullptr;
  launch.ignores_unknown = false;
}

}  // namespace weft
