// SPDX-License-Identifier: Apache-2.0
#include "plan/reference/reference_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <vector>

namespace weft {
namespace {

struct Route {
  int source = 0;
  int32_t token = 0;
  int32_t k = 0;
  int expert = 0;  // of the whole group
  float weight = 0;
  int target = 0;
  int64_t slot = -1;
};

struct Problem {
  std::span<const RouteTable> tables;
  int num_experts;
  PlanOptions options;
  std::vector<int64_t> budgets;  // -1: exact
  [[nodiscard]] int num_ranks() const { return static_cast<int>(tables.size()); }
  [[nodiscard]] int experts_per_rank() const { return num_experts / num_ranks(); }
  [[nodiscard]] bool is_rank_major() const { return options.layout == Layout::kRankMajor; }
  [[nodiscard]] bool is_strided() const { return options.layout == Layout::kExpertStrided; }
};

int64_t round_up(int64_t rows, int64_t multiple) {
  while (rows % multiple != 0) {
    ++rows;
  }
  return rows;
}

// Every route of the group, by source, token and k.
std::vector<Route> list_routes(const Problem& problem) {
  std::vector<Route> all;
  for (int source = 0; source < problem.num_ranks(); ++source) {
    const RouteTable& table = problem.tables[static_cast<size_t>(source)];
    for (size_t i = 0; i < table.expert.size(); ++i) {
      if (table.expert[i] == -1) {
        continue;
      }
      Route route;
      route.source = source;
      route.token = static_cast<int32_t>(i / static_cast<size_t>(table.topk));
      route.k = static_cast<int32_t>(i % static_cast<size_t>(table.topk));
      route.expert = table.expert[i];
      route.weight = table.weight.empty() ? 0 : table.weight[i];
      route.target = route.expert / problem.experts_per_rank();
      all.push_back(route);
    }
  }
  return all;
}

// [num_experts]
std::vector<int64_t> rows_of_experts(const Problem& problem, const std::vector<Route>& routes) {
  std::vector<int64_t> rows(static_cast<size_t>(problem.num_experts), 0);
  for (const Route& route : routes) {
    ++rows[static_cast<size_t>(route.expert)];
  }
  return rows;
}

int64_t resolved_stride(const Problem& problem, const std::vector<int64_t>& rows) {
  if (!problem.is_strided() || problem.options.expert_stride != 0) {
    return problem.options.expert_stride;
  }
  int64_t stride = 0;
  for (const int64_t count : rows) {
    stride = std::max(stride, round_up(count, problem.options.pad_multiple));
  }
  return stride;
}

// --- which route gets which slot, by sorting ---

struct Block {
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t padded = 0;
};

// Gives every route to `rank` its slot and fills what the receiver knows.
class Receiver {
 public:
  Receiver(const Problem& problem, std::vector<Route>& routes, PlanData& plan)
      : problem_(problem), plan_(plan) {
    for (Route& route : routes) {
      if (route.target == plan.shape.rank) {
        mine_.push_back(&route);
      }
    }
    rows_ = rows_of_experts(problem, routes);
  }

  void number_rows() {
    if (problem_.is_rank_major()) {
      number_arrivals();
    } else {
      number_experts();
    }
    plan_.rows_per_expert.assign(static_cast<size_t>(problem_.experts_per_rank()), 0);
    for (const Route* route : mine_) {
      const bool kept = route->slot >= 0;
      plan_.overflow |= !kept;
      plan_.rows_per_expert[static_cast<size_t>(route->expert % problem_.experts_per_rank())] +=
          kept ? 1 : 0;
    }
    finish_blocks();
  }

 private:
  [[nodiscard]] int64_t budget() const {
    return problem_.budgets[static_cast<size_t>(plan_.shape.rank)];
  }

  void number_arrivals() {
    std::set<std::pair<int, int32_t>> arrivals;  // by source rank, then token
    for (const Route* route : mine_) {
      arrivals.emplace(route->source, route->token);
    }
    plan_.required_rows = static_cast<int64_t>(arrivals.size());
    plan_.num_rows = budget() >= 0 ? budget() : plan_.required_rows;
    for (Route* route : mine_) {
      const auto place = arrivals.find({route->source, route->token});
      const int64_t row = std::distance(arrivals.begin(), place);
      route->slot = row < plan_.num_rows ? row : -1;
    }
  }

  void number_experts() {
    const int64_t stride = resolved_stride(problem_, rows_);
    const int64_t pad = problem_.options.pad_multiple;
    int64_t begin = 0;
    for (int local = 0; local < problem_.experts_per_rank(); ++local) {
      const int expert = plan_.shape.rank * problem_.experts_per_rank() + local;
      const int64_t rows = rows_[static_cast<size_t>(expert)];
      blocks_.push_back({begin, rows, round_up(rows, pad)});
      begin += problem_.is_strided() ? stride : round_up(rows, pad);
    }
    plan_.required_rows = begin;
    if (problem_.is_strided()) {
      int64_t largest = 0;
      for (const int64_t rows : rows_) {
        largest = std::max(largest, round_up(rows, pad));
      }
      plan_.required_rows = largest * problem_.experts_per_rank();
    }
    plan_.num_rows = budget() >= 0 ? budget() : begin;
    place_in_blocks(stride);
  }

  void place_in_blocks(int64_t stride) {
    std::sort(mine_.begin(), mine_.end(), [](const Route* a, const Route* b) {
      return std::tie(a->expert, a->source, a->token, a->k) <
             std::tie(b->expert, b->source, b->token, b->k);
    });
    std::map<int, int64_t> used;  // rows of each expert so far
    for (Route* route : mine_) {
      const int64_t place = used[route->expert]++;
      const int64_t begin =
          blocks_[static_cast<size_t>(route->expert % problem_.experts_per_rank())].begin;
      const bool fits =
          begin + place < plan_.num_rows && (!problem_.is_strided() || place < stride);
      route->slot = fits ? begin + place : -1;
    }
  }

  void finish_blocks() {
    const auto num_local = static_cast<size_t>(problem_.experts_per_rank());
    plan_.padded_rows_per_expert = plan_.rows_per_expert;
    plan_.expert_begin.assign(num_local, 0);
    if (problem_.is_rank_major()) {
      return;
    }
    const int64_t stride = resolved_stride(problem_, rows_);
    for (size_t e = 0; e < num_local; ++e) {
      const Block& block = blocks_[e];
      plan_.expert_begin[e] = std::min(block.begin, plan_.num_rows);
      int64_t end = std::min(block.begin + block.padded, plan_.num_rows);
      if (problem_.is_strided()) {
        end = std::min(end, block.begin + stride);
      }
      plan_.padded_rows_per_expert[e] = std::max<int64_t>(0, end - block.begin);
      const int64_t kept_end = plan_.expert_begin[e] + plan_.rows_per_expert[e];
      if (kept_end < end) {
        plan_.padding.emplace_back(kept_end, end);
      }
    }
  }

  const Problem& problem_;
  PlanData& plan_;
  std::vector<Route*> mine_;
  std::vector<int64_t> rows_;  // [num_experts]
  std::vector<Block> blocks_;
};

// --- plans from numbered routes ---

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
  shape.options.expert_stride = resolved_stride(problem, rows);
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
  std::vector<Route> all = list_routes(problem);
  const std::vector<int64_t> rows = rows_of_experts(problem, all);

  std::vector<PlanData> plans(routes.size());
  for (int rank = 0; rank < problem.num_ranks(); ++rank) {
    PlanData& plan = plans[static_cast<size_t>(rank)];
    plan.shape = shape_of(problem, rows, rank);
    plan.global_routes = rows;
    Receiver(problem, all, plan).number_rows();
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
