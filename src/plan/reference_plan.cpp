// SPDX-License-Identifier: Apache-2.0
#include "plan/reference_plan.hpp"

#include <algorithm>
#include <tuple>

#include "plan/reference_rows.hpp"

namespace weft {
namespace {

using reference::Problem;
using reference::Route;

// The kept routes of one pair, in (token, slot, k) order.
Arrivals pair_arrivals(
    const Problem& problem, const std::vector<Route>& routes, int source, int target
) {
  std::vector<Route> kept;
  for (const Route& route : routes) {
    if (route.source == source && route.target == target && route.slot >= 0) {
      kept.push_back(route);
    }
  }
  std::sort(kept.begin(), kept.end(), [](const Route& a, const Route& b) {
    return std::tie(a.token, a.slot, a.k) < std::tie(b.token, b.slot, b.k);
  });
  Arrivals out;
  out.one_row = problem.is_rank_major();
  for (const Route& route : kept) {
    if (out.token.empty() || out.token.back() != route.token) {
      out.token.push_back(route.token);
      out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
    }
    out.slot.push_back(static_cast<int32_t>(route.slot));
    out.k.push_back(route.k);
    out.expert.push_back(route.expert % problem.experts_per_rank());
    if (!problem.tables[static_cast<size_t>(source)].weight.empty()) {
      out.weight.push_back(route.weight);
    }
  }
  out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
  return out;
}

void fill_source(const Problem& problem, const std::vector<Route>& routes, PlanData& plan) {
  const RouteTable& table = problem.tables[static_cast<size_t>(plan.shape.rank)];
  plan.route_expert = table.expert;
  plan.route_slot.assign(table.expert.size(), -1);
  for (const Route& route : routes) {
    if (route.source == plan.shape.rank) {
      const size_t place = static_cast<size_t>(route.token) * static_cast<size_t>(table.topk) +
                           static_cast<size_t>(route.k);
      plan.route_slot[place] = static_cast<int32_t>(route.slot);
      plan.overflow |= route.slot < 0;
    }
  }
  for (int token = 0; token < table.num_tokens; ++token) {
    plan.token_begin.push_back(static_cast<int32_t>(plan.token_arrivals.size()));
    for (int rank = 0; rank < problem.num_ranks(); ++rank) {
      const std::vector<int32_t>& tokens = plan.sent[static_cast<size_t>(rank)].token;
      const auto found = std::lower_bound(tokens.begin(), tokens.end(), token);
      if (found != tokens.end() && *found == token) {
        plan.token_arrivals.push_back({rank, static_cast<int32_t>(found - tokens.begin())});
      }
    }
  }
  plan.token_begin.push_back(static_cast<int32_t>(plan.token_arrivals.size()));
}

void fill_row_experts(const Problem& problem, const std::vector<Route>& routes, PlanData& plan) {
  if (!problem.is_rank_major()) {
    return;
  }
  const auto topk = static_cast<size_t>(plan.shape.topk);
  plan.row_experts.assign(static_cast<size_t>(plan.num_rows) * topk, -1);
  for (const Route& route : routes) {
    if (route.target == plan.shape.rank && route.slot >= 0) {
      plan.row_experts[static_cast<size_t>(route.slot) * topk + static_cast<size_t>(route.k)] =
          route.expert % problem.experts_per_rank();
    }
  }
}

PlanShape shape_of(const Problem& problem, const std::vector<int64_t>& rows, int rank) {
  const RouteTable& table = problem.tables[static_cast<size_t>(rank)];
  PlanShape shape;
  shape.rank = rank;
  shape.num_ranks = problem.num_ranks();
  shape.num_experts = problem.num_experts;
  shape.topk = table.topk;
  shape.num_tokens = table.num_tokens;
  shape.from_map = table.from_map;
  shape.has_weights = table.has_weights || !table.weight.empty();
  shape.options = problem.options;
  shape.options.expert_stride = reference::resolved_stride(problem, rows);
  const int64_t budget = problem.budgets[static_cast<size_t>(rank)];
  shape.options.row_budget = budget < 0 ? std::nullopt : std::optional(budget);
  return shape;
}

}  // namespace

std::vector<PlanData> reference_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets
) {
  Problem problem = {routes, num_experts, options, {row_budgets.begin(), row_budgets.end()}};
  if (row_budgets.empty()) {
    problem.budgets.assign(routes.size(), options.row_budget.value_or(-1));
  }
  std::vector<Route> all = reference::list_routes(problem);
  const std::vector<int64_t> rows = reference::rows_of_experts(problem, all);

  std::vector<PlanData> plans(routes.size());
  for (int rank = 0; rank < problem.num_ranks(); ++rank) {
    PlanData& plan = plans[static_cast<size_t>(rank)];
    plan.shape = shape_of(problem, rows, rank);
    plan.global_routes = rows;
    reference::number_rows(problem, all, plan);
  }
  for (PlanData& plan : plans) {
    for (int peer = 0; peer < problem.num_ranks(); ++peer) {
      plan.sent.push_back(pair_arrivals(problem, all, plan.shape.rank, peer));
      plan.received.push_back(pair_arrivals(problem, all, peer, plan.shape.rank));
    }
    fill_source(problem, all, plan);
    fill_row_experts(problem, all, plan);
  }
  return plans;
}

}  // namespace weft
