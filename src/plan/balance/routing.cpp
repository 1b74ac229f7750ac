// SPDX-License-Identifier: Apache-2.0
#include "plan/balance/routing.hpp"

#include <algorithm>
#include <functional>
#include <limits>

namespace weft {
namespace {

constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();  // of a replica

void check_placement(
    std::span<const int32_t> placement, const PhysicalExperts& shape, const Context& context
) {
  const auto num_places =
      static_cast<size_t>(shape.num_ranks) * static_cast<size_t>(shape.replicas);
  WEFT_CHECK_ARG(
      context,
      placement.size() == num_places,
      "plan: the placement has {} entries (expected {} ranks x {} replicas)",
      placement.size(),
      shape.num_ranks,
      shape.replicas
  );
  for (size_t i = 0; i < placement.size(); ++i) {
    const auto rank = static_cast<int>(i) / shape.replicas;
    const int32_t expert = placement[i];
    const auto refuse_if = [&](bool is_wrong, std::string_view problem) {
      WEFT_CHECK_ARG(
          context,
          !is_wrong,
          "plan: placement[{}, {}] = {} {} ({} experts, {} of each rank's own, -1 = none)",
          rank,
          static_cast<int>(i) % shape.replicas,
          expert,
          problem,
          shape.num_experts,
          shape.num_local()
      );
    };
    refuse_if(expert < -1 || expert >= shape.num_experts, "is no expert");
    if (expert >= 0) {
      const auto of_rank = placement.first(i).subspan(static_cast<size_t>(rank * shape.replicas));
      refuse_if(shape.owner_of(expert) == rank, "lies there anyway");
      refuse_if(std::ranges::find(of_rank, expert) != of_rank.end(), "is there twice");
    }
  }
}

}  // namespace

void check_balancing(
    const Balancing& balancing, int num_ranks, int num_experts, const Context& context
) {
  WEFT_CHECK_ARG(
      context,
      balancing.replicas >= 0 && balancing.replicas <= kMostReplicas,
      "plan: replicas = {} (0 to {})",
      balancing.replicas,
      kMostReplicas
  );
  WEFT_CHECK_ARG(
      context,
      balancing.min_rows >= 1 && balancing.min_rows <= kMostRows,
      "plan: min_rows = {} of a replica (1 to {})",
      balancing.min_rows,
      kMostRows
  );
  WEFT_CHECK_ARG(
      context,
      balancing.block_rows >= 1 && balancing.block_rows <= kMostBlockRows,
      "plan: block_rows = {} of replicas (1 to {})",
      balancing.block_rows,
      kMostBlockRows
  );
  WEFT_CHECK_ARG(
      context,
      balancing.replica_rows >= 0 && balancing.replica_rows <= kMostReplicaRows,
      "plan: replica_rows = {} of a replica (0 to {})",
      balancing.replica_rows,
      kMostReplicaRows
  );
  if (!balancing.placement.empty()) {
    check_placement(balancing.placement, {num_ranks, num_experts, balancing.replicas}, context);
  }
}

Balance balance_counts(
    std::span<const RankCounts> counts,
    const Balancing& balancing,
    std::span<const int> domain_of,
    std::span<const int> lost
) {
  const auto num_ranks = static_cast<int>(counts.size());
  std::vector<int32_t> routes;
  for (const RankCounts& one : counts) {
    routes.insert(routes.end(), one.routes.begin(), one.routes.end());
  }
  if (balancing.placement.empty()) {
    const BalanceOptions options = {
        .replicas = balancing.replicas,
        .min_rows = balancing.min_rows,
        .domain_of = {domain_of.begin(), domain_of.end()},
        .block_rows = balancing.block_rows,
        .replica_rows = balancing.replica_rows,
        .lost = {lost.begin(), lost.end()}};
    return plan_balance(routes, num_ranks, options);
  }
  const PhysicalExperts shape = {
      num_ranks, static_cast<int>(counts[0].routes.size()), balancing.replicas};
  std::vector<int64_t> rows(counts[0].routes.size(), 0);
  for (const RankCounts& one : counts) {
    std::ranges::transform(rows, one.routes, rows.begin(), std::plus());
  }
  Placement spread = spread_rows(rows, shape, balancing.placement, balancing.block_rows, lost);
  return share_out(routes, std::move(spread), domain_of);
}

RouteTable physical_routes(RouteTable routes, const Balance& balance, int source) {
  routes.expert = assign_routes(balance, source, routes.expert);
  return routes;
}

std::vector<RankCounts> physical_counts(
    std::span<const RankCounts> counts, const Balance& balance
) {
  std::vector<RankCounts> physical(counts.begin(), counts.end());
  for (size_t source = 0; source < physical.size(); ++source) {
    const std::span<const int64_t> quotas = balance.quotas_of(static_cast<int>(source));
    physical[source].routes.assign(quotas.begin(), quotas.end());
    std::ranges::fill(physical[source].arrivals, 0);
  }
  return physical;
}

PlanOptions resolved_options(PlanOptions options, const Balance& balance) {
  options.balance.placement = balance.replicas();
  return options;
}

}  // namespace weft
