// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "plan/build.hpp"
#include "plan/complete_plan.hpp"
#include "plan/group_shape.hpp"
#include "plan/pair_writer.hpp"
#include "plan/slots.hpp"
#include "weft/routing.hpp"

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

// The order of a token's routes by expert, then k, which is that of their slots; places without a
// route come last. It counts smaller neighbours instead of swapping: no branch to mispredict.
void order_by_expert(std::span<const int32_t> experts, std::array<int32_t, kMaxTopk>& order) {
  std::array<uint32_t, kMaxTopk> place;
  for (size_t j = 0; j < experts.size(); ++j) {
    const auto later = static_cast<uint32_t>(experts[j]);  // -1 is the largest
    uint32_t not_larger = 0;
    for (size_t i = 0; i < j; ++i) {
      const uint32_t is_larger = static_cast<uint32_t>(experts[i]) > later ? 1 : 0;
      place[i] += is_larger;
      not_larger += 1 - is_larger;
    }
    place[j] = not_larger;
  }
  for (size_t j = 0; j < experts.size(); ++j) {
    order[place[j]] = static_cast<int32_t>(j);
  }
}

// The loops over routes, token by token. Each keeps what fits as arrivals of `plan.sent`.
class RoutePlacer {
 public:
  RoutePlacer(PlanData& plan, const RouteTable& routes, const RankCounts& own)
      : plan_(plan), routes_(routes) {
    plan.route_expert = routes.expert;
    plan.route_slot.assign(routes.expert.size(), -1);
    plan.sent.resize(own.arrivals.size());
    const int per_rank = plan.shape.num_local_experts();
    for (int expert = 0; expert < plan.shape.num_experts; ++expert) {
      homes_.push_back({owner_rank(expert, per_rank), local_expert(expert, per_rank)});
    }
    std::vector<int64_t> num_routes(own.arrivals.size());
    for (size_t expert = 0; expert < homes_.size(); ++expert) {
      num_routes[static_cast<size_t>(homes_[expert].rank)] += own.routes[expert];
    }
    for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
      plan.sent[rank].one_row = plan.shape.options.layout == Layout::kRankMajor;
      writers_.emplace_back(
          plan.sent[rank], own.arrivals[rank], num_routes[rank], plan.shape.has_weights
      );
    }
  }

  void place_by_expert(std::vector<SlotCursor> cursors) {
    std::array<int32_t, kMaxTopk> order;
    const auto topk = static_cast<size_t>(routes_.topk);
    for (int32_t token = 0; token < routes_.num_tokens; ++token) {
      const size_t first = static_cast<size_t>(token) * topk;
      order_by_expert(std::span(routes_.expert).subspan(first, topk), order);
      for (size_t i = 0; i < topk; ++i) {
        const size_t route = first + static_cast<size_t>(order[i]);
        const int32_t expert = routes_.expert[route];
        if (expert < 0) {
          break;
        }
        place(token, order[i], route, cursors[static_cast<size_t>(expert)].take());
      }
    }
    finish();
  }

  void place_by_arrival(std::vector<SlotCursor> cursors) {
    std::vector<int32_t> last_token(cursors.size(), -1);
    std::vector<int32_t> row(cursors.size(), -1);  // of that token
    size_t route = 0;
    for (int32_t token = 0; token < routes_.num_tokens; ++token) {
      for (int32_t k = 0; k < routes_.topk; ++k, ++route) {
        const int32_t expert = routes_.expert[route];
        if (expert < 0) {
          continue;
        }
        const auto target = static_cast<size_t>(homes_[static_cast<size_t>(expert)].rank);
        if (last_token[target] != token) {
          last_token[target] = token;
          row[target] = cursors[target].take();
        }
        place(token, k, route, row[target]);
      }
    }
    finish();
  }

 private:
  struct Home {
    int32_t rank;
    int32_t local;
  };

  void place(int32_t token, int32_t k, size_t route, int32_t slot) {
    plan_.route_slot[route] = slot;
    if (slot < 0) {
      plan_.overflow = true;
      return;
    }
    const Home home = homes_[static_cast<size_t>(routes_.expert[route])];
    const float weight = plan_.shape.has_weights ? routes_.weight[route] : 0.0F;
    writers_[static_cast<size_t>(home.rank)].add(token, {slot, k, home.local, weight});
  }

  void finish() {
    for (PairWriter& writer : writers_) {
      writer.finish();
    }
  }

  PlanData& plan_;
  const RouteTable& routes_;
  std::vector<Home> homes_;          // [num_experts]
  std::vector<PairWriter> writers_;  // [num_ranks]
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
