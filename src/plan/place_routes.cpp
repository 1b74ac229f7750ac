// SPDX-License-Identifier: Apache-2.0
#include "plan/build.hpp"
#include "plan/complete_plan.hpp"
#include "plan/group_shape.hpp"
#include "plan/slots.hpp"

namespace weft {
namespace {

// Hands out the slots of one run of rows: an expert's block, or a rank's arrivals.
struct SlotCursor {
  int64_t next = 0;
  int64_t limit = 0;
  int32_t take() { return slot_or_dropped(next++, limit); }
};

// This rank's first slot in every expert block.
std::vector<SlotCursor> expert_cursors(
    const GroupShape& group, std::span<const RankCounts> earlier
) {
  std::vector<SlotCursor> cursors;
  cursors.reserve(group.experts.size());
  for (const ExpertBlock& block : group.experts) {
    cursors.push_back({block.begin, block.limit});
  }
  for (const RankCounts& source : earlier) {
    for (size_t e = 0; e < cursors.size(); ++e) {
      cursors[e].next += source.routes[e];
    }
  }
  return cursors;
}

// This rank's first row on every receiver.
std::vector<SlotCursor> arrival_cursors(
    const GroupShape& group, std::span<const RankCounts> earlier
) {
  std::vector<SlotCursor> cursors;
  cursors.reserve(group.outputs.size());
  for (const OutputShape& output : group.outputs) {
    cursors.push_back({0, output.num_rows});
  }
  for (const RankCounts& source : earlier) {
    for (size_t r = 0; r < cursors.size(); ++r) {
      cursors[r].next += source.arrivals[r];
    }
  }
  return cursors;
}

// The loops over routes, in (token, k) order. Each keeps what fits as arrivals of `plan.sent`.
class RoutePlacer {
 public:
  RoutePlacer(PlanData& plan, const RouteTable& routes, const RankCounts& own)
      : plan_(plan), routes_(routes), per_rank_(plan.shape.num_local_experts()) {
    plan.route_expert = routes.expert;
    plan.route_slot.assign(routes.expert.size(), -1);
    plan.sent.resize(own.arrivals.size());
    for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
      reserve(plan.sent[rank], own, rank);
    }
  }

  void place_by_expert(std::vector<SlotCursor> cursors) {
    for_each_route([&](size_t, int32_t, int32_t expert) {
      return cursors[static_cast<size_t>(expert)].take();
    });
  }

  void place_by_arrival(std::vector<SlotCursor> cursors) {
    std::vector<int32_t> last_token(cursors.size(), -1);
    std::vector<int32_t> row(cursors.size(), -1);  // of that token
    for_each_route([&](size_t target, int32_t token, int32_t) {
      if (last_token[target] != token) {
        last_token[target] = token;
        row[target] = cursors[target].take();
      }
      return row[target];
    });
  }

 private:
  void reserve(Arrivals& arrivals, const RankCounts& own, size_t rank) const {
    size_t num_routes = 0;
    for (size_t e = 0; e < static_cast<size_t>(per_rank_); ++e) {
      num_routes += static_cast<size_t>(own.routes[rank * static_cast<size_t>(per_rank_) + e]);
    }
    const auto num_arrivals = static_cast<size_t>(own.arrivals[rank]);
    arrivals.one_row = plan_.shape.options.layout == Layout::kRankMajor;
    arrivals.token.reserve(num_arrivals);
    arrivals.route_begin.reserve(num_arrivals + 1);
    arrivals.slot.reserve(num_routes);
    arrivals.k.reserve(num_routes);
    arrivals.expert.reserve(num_routes);
    if (plan_.shape.has_weights) {
      arrivals.weight.reserve(num_routes);
    }
  }

  // `slot_of(target, token, expert)` is called once for each route, in order.
  template <class SlotOf>
  void for_each_route(SlotOf slot_of) {
    size_t route = 0;
    for (int64_t t = 0; t < routes_.num_tokens; ++t) {
      const auto token = static_cast<int32_t>(t);
      for (int32_t k = 0; k < routes_.topk; ++k, ++route) {
        const int32_t expert = routes_.expert[route];
        if (expert < 0) {
          continue;
        }
        const auto target = static_cast<size_t>(owner_rank(expert, per_rank_));
        const int32_t slot = slot_of(target, token, expert);
        plan_.route_slot[route] = slot;
        if (slot < 0) {
          plan_.overflow = true;
        } else {
          keep(plan_.sent[target], token, k, route);
        }
      }
    }
    for (Arrivals& arrivals : plan_.sent) {
      arrivals.route_begin.push_back(static_cast<int32_t>(arrivals.num_routes()));
    }
  }

  void keep(Arrivals& arrivals, int32_t token, int32_t k, size_t route) const {
    if (arrivals.token.empty() || arrivals.token.back() != token) {
      arrivals.token.push_back(token);
      arrivals.route_begin.push_back(static_cast<int32_t>(arrivals.num_routes()));
    }
    // A token's routes stand in the order of their slots: k order unless its experts are out of
    // order.
    const int32_t slot = plan_.route_slot[route];
    size_t place = arrivals.slot.size();
    while (place > static_cast<size_t>(arrivals.route_begin.back()) &&
           arrivals.slot[place - 1] > slot) {
      --place;
    }
    const auto insert = [place](auto& values, auto value) {
      values.insert(values.begin() + static_cast<std::ptrdiff_t>(place), value);
    };
    insert(arrivals.slot, slot);
    insert(arrivals.k, k);
    insert(arrivals.expert, local_expert(routes_.expert[route], per_rank_));
    if (plan_.shape.has_weights) {
      insert(arrivals.weight, routes_.weight[route]);
    }
  }

  PlanData& plan_;
  const RouteTable& routes_;
  const int per_rank_;
};

// What this rank will receive, as far as counts tell.
void shape_output(PlanData& plan, const GroupShape& group) {
  const OutputShape& output = group.outputs[static_cast<size_t>(plan.shape.rank)];
  plan.num_rows = output.num_rows;
  plan.required_rows = output.required_rows;
  plan.overflow = output.overflow;
  for (const ExpertBlock& block : group.experts) {
    plan.global_routes.push_back(block.rows);
  }

  const auto per_rank = static_cast<size_t>(plan.shape.num_local_experts());
  const size_t first = per_rank * static_cast<size_t>(plan.shape.rank);
  for (const ExpertBlock& block : std::span(group.experts).subspan(first, per_rank)) {
    if (plan.shape.options.layout == Layout::kRankMajor) {
      plan.expert_begin.push_back(0);
      plan.rows_per_expert.push_back(block.rows);
      plan.padded_rows_per_expert.push_back(block.rows);
      continue;
    }
    const int64_t begin = at_most(block.begin, output.num_rows);
    const int64_t rows = rows_within(begin, block.rows, block.limit);
    const int64_t padded =
        rows_within(begin, padded_count(block.rows, group.rule.pad_multiple), block.limit);
    plan.expert_begin.push_back(begin);
    plan.rows_per_expert.push_back(rows);
    plan.padded_rows_per_expert.push_back(padded);
    if (rows < padded) {
      plan.padding.emplace_back(begin + rows, begin + padded);
    }
  }
}

}  // namespace

PlanData place_routes(
    const RouteTable& routes,
    std::span<const RankCounts> counts,
    int rank,
    int num_experts,
    const PlanOptions& options,
    const Context& context
) {
  const GroupShape group = group_shape(counts, num_experts, options, context);
  const auto earlier = counts.first(static_cast<size_t>(rank));

  PlanData plan;
  plan.shape.rank = rank;
  plan.shape.num_ranks = static_cast<int>(counts.size());
  plan.shape.num_experts = num_experts;
  plan.shape.topk = routes.topk;
  plan.shape.num_tokens = routes.num_tokens;
  plan.shape.from_map = routes.from_map;
  plan.shape.has_weights = !routes.weight.empty() || (routes.has_weights && routes.expert.empty());
  plan.shape.options = options;
  plan.shape.options.expert_stride = group.rule.stride;
  shape_output(plan, group);

  RoutePlacer placer(plan, routes, counts[static_cast<size_t>(rank)]);
  if (options.layout == Layout::kRankMajor) {
    placer.place_by_arrival(arrival_cursors(group, earlier));
  } else {
    placer.place_by_expert(expert_cursors(group, earlier));
  }
  link_tokens(plan);
  return plan;
}

}  // namespace weft
