// SPDX-License-Identifier: Apache-2.0
#include "plan/reference/reference_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <tuple>

#include "plan/balance/routing.hpp"

namespace weft {
namespace {

struct Route {
  int source = 0;
  int32_t token = 0;
  int32_t k = 0;
  int expert = 0;  // of the whole group
  float weight = 0;
  int64_t slot = -1;
};

struct Problem {
  std::span<const RouteTable> tables;
  PlanOptions options;  // expert_stride resolved
  int experts_per_rank = 1;
  std::vector<Route> routes = {};  // of the group, by source, token and k
  std::vector<int64_t> rows = {};  // [num_experts]
  int64_t largest = 0;             // padded rows of an expert

  [[nodiscard]] bool is_rank_major() const { return options.layout == Layout::kRankMajor; }
  [[nodiscard]] bool is_strided() const { return options.layout == Layout::kExpertStrided; }
  [[nodiscard]] int target(const Route& route) const { return route.expert / experts_per_rank; }
};

int64_t round_up(int64_t rows, int64_t multiple) {
  while (rows % multiple != 0) {
    ++rows;
  }
  return rows;
}

void list_routes(Problem& problem) {
  for (size_t source = 0; source < problem.tables.size(); ++source) {
    const RouteTable& table = problem.tables[source];
    for (size_t i = 0; i < table.expert.size(); ++i) {
      if (table.expert[i] != -1) {
        problem.routes.push_back(
            {.source = static_cast<int>(source),
             .token = static_cast<int32_t>(i) / table.topk,
             .k = static_cast<int32_t>(i) % table.topk,
             .expert = table.expert[i],
             .weight = table.weight.empty() ? 0 : table.weight[i]}
        );
        ++problem.rows[static_cast<size_t>(table.expert[i])];
      }
    }
  }
  for (const int64_t rows : problem.rows) {
    problem.largest = std::max(problem.largest, round_up(rows, problem.options.pad_multiple));
  }
  if (problem.is_strided() && problem.options.expert_stride == 0) {
    problem.options.expert_stride = problem.largest;
  }
}

PlanShape shape_of(const Problem& problem, int rank, int64_t budget) {
  const RouteTable& table = problem.tables[static_cast<size_t>(rank)];
  PlanShape shape;
  shape.rank = rank;
  shape.num_ranks = static_cast<int>(problem.tables.size());
  shape.num_experts = static_cast<int>(problem.rows.size());
  shape.topk = table.topk;
  shape.num_tokens = table.num_tokens;
  shape.from_map = table.from_map;
  shape.has_weights = table.has_weights || !table.weight.empty();
  shape.options = problem.options;
  shape.options.row_budget = budget < 0 ? std::nullopt : std::optional(budget);
  return shape;
}

// --- which route gets which slot ---

// Numbers one row for each (source, token).
void number_arrivals(Problem& problem, PlanData& plan, int64_t budget) {
  std::set<std::pair<int, int32_t>> arrivals;
  const auto is_here = [&](const Route& r) { return problem.target(r) == plan.shape.rank; };
  for (const Route& route : problem.routes) {
    if (is_here(route)) {
      arrivals.emplace(route.source, route.token);
    }
  }
  plan.required_rows = static_cast<int64_t>(arrivals.size());
  plan.num_rows = budget >= 0 ? budget : plan.required_rows;
  plan.row_experts.assign(static_cast<size_t>(plan.num_rows * plan.shape.topk), -1);
  plan.rows_per_expert.assign(static_cast<size_t>(problem.experts_per_rank), 0);
  plan.expert_begin = plan.rows_per_expert;
  for (Route& route : problem.routes) {
    if (!is_here(route)) {
      continue;
    }
    const auto place = arrivals.find({route.source, route.token});
    const int64_t row = std::distance(arrivals.begin(), place);
    route.slot = row < plan.num_rows ? row : -1;
    plan.overflow |= route.slot < 0;
    if (route.slot >= 0) {
      const int local = route.expert % problem.experts_per_rank;
      ++plan.rows_per_expert[static_cast<size_t>(local)];
      plan.row_experts[static_cast<size_t>(route.slot * plan.shape.topk + route.k)] = local;
    }
  }
  plan.padded_rows_per_expert = plan.rows_per_expert;
}

// Numbers one block for each expert, its routes by source, token and k.
void number_experts(Problem& problem, PlanData& plan, int64_t budget) {
  const int first = plan.shape.rank * problem.experts_per_rank;
  const auto padded_rows = [&](int expert) {
    return round_up(problem.rows[static_cast<size_t>(expert)], problem.options.pad_multiple);
  };
  const auto step = [&](int expert) {
    return problem.is_strided() ? problem.options.expert_stride : padded_rows(expert);
  };
  int64_t all_rows = 0;
  for (int expert = first; expert < first + problem.experts_per_rank; ++expert) {
    all_rows += step(expert);
  }
  plan.required_rows = problem.is_strided() ? problem.largest * problem.experts_per_rank : all_rows;
  plan.num_rows = budget >= 0 ? budget : all_rows;
  int64_t begin = 0;
  for (int expert = first; expert < first + problem.experts_per_rank; ++expert) {
    const int64_t limit = problem.is_strided() ? begin + step(expert) : plan.num_rows;
    int64_t next = begin;
    int64_t kept_end = std::min(begin, plan.num_rows);
    plan.expert_begin.push_back(kept_end);
    for (Route& route : problem.routes) {
      if (route.expert == expert) {
        route.slot = next < limit ? next : -1;
        kept_end += next < limit ? 1 : 0;
        plan.overflow |= next >= limit;
        ++next;
      }
    }
    const int64_t end = std::min(begin + padded_rows(expert), limit);
    plan.rows_per_expert.push_back(kept_end - plan.expert_begin.back());
    plan.padded_rows_per_expert.push_back(std::max<int64_t>(0, end - begin));
    if (kept_end < end) {
      plan.padding.emplace_back(kept_end, end);
    }
    begin += step(expert);
  }
}

// --- plans from numbered routes ---

// Returns the kept routes of a pair, in (token, slot, k) order.
Arrivals pair_arrivals(const Problem& problem, int source, int target) {
  const auto& all = problem.routes;
  const auto begin = std::ranges::lower_bound(all, source, {}, &Route::source);
  const auto end = std::ranges::upper_bound(all, source, {}, &Route::source);
  std::vector<Route> kept;
  std::copy_if(begin, end, std::back_inserter(kept), [&](const Route& route) {
    return problem.target(route) == target && route.slot >= 0;
  });
  std::ranges::sort(kept, [](const Route& a, const Route& b) {
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
    out.expert.push_back(route.expert % problem.experts_per_rank);
    if (!problem.tables[static_cast<size_t>(source)].weight.empty()) {
      out.weight.push_back(route.weight);
    }
  }
  out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
  return out;
}

void fill_source(const Problem& problem, PlanData& plan) {
  const RouteTable& table = problem.tables[static_cast<size_t>(plan.shape.rank)];
  plan.route_expert = table.expert;
  plan.route_slot.assign(table.expert.size(), -1);
  for (const Route& route : problem.routes) {
    if (route.source == plan.shape.rank) {
      const auto place = static_cast<size_t>(route.token * table.topk + route.k);
      plan.route_slot[place] = static_cast<int32_t>(route.slot);
      plan.overflow |= route.slot < 0;
    }
  }
  for (int token = 0; token < table.num_tokens; ++token) {
    plan.token_begin.push_back(static_cast<int32_t>(plan.token_arrivals.size()));
    for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
      const std::vector<int32_t>& tokens = plan.sent[rank].token;
      const auto found = std::ranges::lower_bound(tokens, token);
      if (found != tokens.end() && *found == token) {
        plan.token_arrivals.push_back(
            {static_cast<int32_t>(rank), static_cast<int32_t>(found - tokens.begin())}
        );
      }
    }
  }
  plan.token_begin.push_back(static_cast<int32_t>(plan.token_arrivals.size()));
}

// Makes plans of routes to physical experts, or of any routes without replicas.
std::vector<PlanData> plans_of_physical(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets
) {
  const auto num_ranks = static_cast<int>(routes.size());
  Problem problem = {routes, options, num_experts / num_ranks};
  problem.rows.resize(static_cast<size_t>(num_experts));
  list_routes(problem);
  std::vector<PlanData> plans(routes.size());
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const int64_t budget =
        row_budgets.empty() ? options.row_budget.value_or(-1) : row_budgets[rank];
    plans[rank].shape = shape_of(problem, static_cast<int>(rank), budget);
    plans[rank].global_routes = problem.rows;
    problem.is_rank_major() ? number_arrivals(problem, plans[rank], budget)
                            : number_experts(problem, plans[rank], budget);
  }
  for (PlanData& plan : plans) {
    for (int peer = 0; peer < num_ranks; ++peer) {
      plan.sent.push_back(pair_arrivals(problem, plan.shape.rank, peer));
      plan.received.push_back(pair_arrivals(problem, peer, plan.shape.rank));
    }
    fill_source(problem, plan);
  }
  return plans;
}

// Decides which rows go to which replica.
Balance balance_of(
    std::span<const RouteTable> routes,
    int num_experts,
    const Balancing& balancing,
    std::span<const int> domain_of,
    std::span<const int> lost
) {
  std::vector<RankCounts> counts(routes.size());
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    counts[rank].routes.resize(static_cast<size_t>(num_experts));
    for (const int32_t expert : routes[rank].expert) {
      if (expert >= 0) {
        ++counts[rank].routes[static_cast<size_t>(expert)];
      }
    }
  }
  return balance_counts(counts, balancing, domain_of, lost);
}

}  // namespace

std::vector<PlanData> reference_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets,
    std::span<const int> domain_of,
    std::span<const int> lost
) {
  std::vector<PlanData> plans;
  if (options.balance.replicas > 0) {
    const Balance balance = balance_of(routes, num_experts, options.balance, domain_of, lost);
    std::vector<RouteTable> physical(routes.begin(), routes.end());
    for (size_t rank = 0; rank < physical.size(); ++rank) {
      physical[rank].expert = assign_routes(balance, static_cast<int>(rank), routes[rank].expert);
    }
    plans = plans_of_physical(
        physical, balance.placement.shape.count(), resolved_options(options, balance), row_budgets
    );
  } else {
    plans = plans_of_physical(routes, num_experts, options, row_budgets);
  }
  for (PlanData& plan : plans) {
    plan.shape.lost.assign(lost.begin(), lost.end());
  }
  return plans;
}

}  // namespace weft
