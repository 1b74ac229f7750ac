// SPDX-License-Identifier: Apache-2.0
#include "plan/build.hpp"

#include <algorithm>
#include <array>

#include "plan/balance/routing.hpp"
#include "plan/pair_writer.hpp"
#include "plan/slots.hpp"
#include "weft/routing.hpp"

namespace weft {

// --- counts ---

void add_counts(const RouteTable& routes, int64_t begin, int64_t end, RankCounts& counts) {
  const auto num_ranks = counts.arrivals.size();
  const int per_rank = static_cast<int>(counts.routes.size() / num_ranks);
  std::vector<int64_t> last_token(num_ranks, -1);  // seen going to each rank
  const int32_t* expert = routes.expert.data() + begin * routes.topk;
  for (int64_t token = begin; token < end; ++token) {
    for (int k = 0; k < routes.topk; ++k, ++expert) {
      if (*expert < 0) {
        continue;
      }
      ++counts.routes[static_cast<size_t>(*expert)];
      const auto target = static_cast<size_t>(owner_rank(*expert, per_rank));
      counts.arrivals[target] += last_token[target] != token ? 1 : 0;
      last_token[target] = token;
    }
  }
}

RankCounts count_routes(
    const RouteTable& routes, int num_experts, int num_ranks, const PlanOptions& options
) {
  RankCounts counts;
  counts.num_tokens = routes.num_tokens;
  counts.row_budget = options.row_budget.value_or(-1);
  counts.routes.resize(static_cast<size_t>(num_experts));
  counts.arrivals.resize(static_cast<size_t>(num_ranks));
  add_counts(routes, 0, routes.num_tokens, counts);
  return counts;
}

// --- slots ---

namespace {

// Hands out the slots of one run of rows: an expert's block, or a rank's arrivals.
struct SlotCursor {
  int64_t next = 0;
  int64_t limit = 0;
  int32_t take() { return slot_or_dropped(next++, limit); }
};

// This rank's first slot in every expert block, or for kRankMajor its first row on every receiver.
std::vector<SlotCursor> first_slots(
    const GroupShape& group, std::span<const RankCounts> earlier, bool is_rank_major
) {
  std::vector<SlotCursor> cursors;
  if (is_rank_major) {
    for (const OutputShape& output : group.outputs) {
      cursors.push_back({0, output.num_rows});
    }
  } else {
    for (const ExpertBlock& block : group.experts) {
      cursors.push_back({block.begin, block.limit});
    }
  }
  for (const RankCounts& source : earlier) {
    const std::vector<int32_t>& taken = is_rank_major ? source.arrivals : source.routes;
    for (size_t i = 0; i < cursors.size(); ++i) {
      cursors[i].next += taken[i];
    }
  }
  return cursors;
}

// Orders a token's routes by expert, then k, as their slots are; places without a route come last.
// Counts smaller neighbours instead of swapping: no branch to mispredict.
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

// Consecutive tokens, and where their slots and arrivals begin.
struct Part {
  int64_t begin = 0;  // token
  int64_t end = 0;
  std::vector<SlotCursor> cursors;  // by expert, or for kRankMajor by rank
  std::vector<PairWriter> writers;  // [num_ranks]
  bool overflow = false;
};

// Loops over routes, token by token, and keeps those that fit as arrivals of `plan.sent`.
class RoutePlacer {
 public:
  RoutePlacer(PlanData& plan, const RouteTable& routes, const GroupShape& group)
      : plan_(plan), routes_(routes), topk_(static_cast<size_t>(routes.topk)) {
    plan.route_expert = routes.expert;
    plan.route_slot.resize(routes.expert.size());
    const int per_rank = plan.shape.num_local_experts();
    for (int expert = 0; expert < plan.shape.num_experts; ++expert) {
      homes_.push_back({owner_rank(expert, per_rank), local_expert(expert, per_rank)});
    }
    is_rank_major_ = plan.shape.options.layout == Layout::kRankMajor;
    drops_ = is_rank_major_ ? std::ranges::any_of(group.outputs, &OutputShape::overflow)
                            : std::ranges::any_of(group.experts, [](const ExpertBlock& block) {
                                return block.begin + block.rows > block.limit;
                              });
  }

  void run(const RankCounts& own, std::vector<SlotCursor> cursors, const Sharing& sharing) {
    make_room(own);
    std::vector<Part> parts = cut(drops_ ? 1 : sharing.num_parts, own, cursors, sharing);
    sharing.each(parts.size(), [&](size_t i) {
      is_rank_major_ ? place_by_arrival(parts[i]) : place_by_expert(parts[i]);
    });
    for (size_t rank = 0; rank < plan_.sent.size(); ++rank) {
      parts.back().writers[rank].finish(plan_.sent[rank]);
    }
    plan_.overflow = plan_.overflow || std::ranges::any_of(parts, &Part::overflow);
  }

 private:
  struct Home {
    int32_t rank;
    int32_t local;
  };

  void make_room(const RankCounts& own) {
    const std::vector<size_t> num_routes = routes_by_rank(own);
    plan_.sent.resize(own.arrivals.size());
    for (size_t rank = 0; rank < plan_.sent.size(); ++rank) {
      plan_.sent[rank].one_row = is_rank_major_;
      const auto arrivals = static_cast<size_t>(own.arrivals[rank]);
      PairWriter::resize(plan_.sent[rank], arrivals, num_routes[rank], plan_.shape.has_weights);
    }
  }

  [[nodiscard]] std::vector<size_t> routes_by_rank(const RankCounts& counts) const {
    std::vector<size_t> sums(counts.arrivals.size());
    for (size_t expert = 0; expert < homes_.size(); ++expert) {
      sums[static_cast<size_t>(homes_[expert].rank)] += static_cast<size_t>(counts.routes[expert]);
    }
    return sums;
  }

  // Makes parts of about as many tokens each; counts them unless there is one.
  [[nodiscard]] std::vector<Part> cut(
      size_t num_parts,
      const RankCounts& own,
      std::vector<SlotCursor>& cursors,
      const Sharing& sharing
  ) const {
    const auto count = static_cast<int64_t>(num_parts);
    std::vector<Part> parts(num_parts);
    std::vector<RankCounts> counts(num_parts, own);
    sharing.each(num_parts, [&](size_t i) {
      const auto n = static_cast<int64_t>(i);
      parts[i].begin = routes_.num_tokens * n / count;
      parts[i].end = routes_.num_tokens * (n + 1) / count;
      if (num_parts > 1) {
        std::ranges::fill(counts[i].routes, 0);
        std::ranges::fill(counts[i].arrivals, 0);
        add_counts(routes_, parts[i].begin, parts[i].end, counts[i]);
      }
    });
    std::vector<size_t> num_arrivals(plan_.sent.size());
    std::vector<size_t> num_routes(plan_.sent.size());
    for (size_t i = 0; i < num_parts; ++i) {
      parts[i].cursors = cursors;
      const std::vector<size_t> routes = routes_by_rank(counts[i]);
      for (size_t rank = 0; rank < plan_.sent.size(); ++rank) {
        parts[i].writers.emplace_back(plan_.sent[rank], num_arrivals[rank], num_routes[rank]);
        num_arrivals[rank] += static_cast<size_t>(counts[i].arrivals[rank]);
        num_routes[rank] += routes[rank];
      }
      const auto& taken = is_rank_major_ ? counts[i].arrivals : counts[i].routes;
      for (size_t c = 0; c < cursors.size(); ++c) {
        cursors[c].next += taken[c];
      }
    }
    return parts;
  }

  void place_by_expert(Part& part) {
    std::array<int32_t, kMaxTopk> order;
    const int32_t* const experts = routes_.expert.data();
    for (int64_t token = part.begin; token < part.end; ++token) {
      const size_t first = static_cast<size_t>(token) * topk_;
      order_by_expert({experts + first, topk_}, order);
      for (size_t i = 0; i < topk_; ++i) {
        const size_t route = first + static_cast<size_t>(order[i]);
        const int32_t expert = experts[route];
        const bool is_there = expert >= 0;
        const auto slot = is_there ? part.cursors[static_cast<size_t>(expert)].take() : -1;
        place(part, token, order[i], route, is_there, slot);
      }
    }
  }

  void place_by_arrival(Part& part) {
    std::vector<int64_t> last_token(part.cursors.size(), -1);
    std::vector<int32_t> row(part.cursors.size(), -1);  // of that token
    auto route = static_cast<size_t>(part.begin) * topk_;
    for (int64_t token = part.begin; token < part.end; ++token) {
      for (int32_t k = 0; k < routes_.topk; ++k, ++route) {
        const int32_t expert = routes_.expert[route];
        if (expert < 0) {
          place(part, token, k, route, false, -1);
          continue;
        }
        const auto target = static_cast<size_t>(homes_[static_cast<size_t>(expert)].rank);
        if (last_token[target] != token) {
          last_token[target] = token;
          row[target] = part.cursors[target].take();
        }
        place(part, token, k, route, true, row[target]);
      }
    }
  }

  void place(Part& part, int64_t token, int32_t k, size_t route, bool is_there, int32_t slot) {
    plan_.route_slot[route] = slot;
    if (slot < 0) {
      part.overflow = part.overflow || is_there;
      return;
    }
    const Home home = homes_[static_cast<size_t>(routes_.expert[route])];
    const float weight = plan_.shape.has_weights ? routes_.weight[route] : 0.0F;
    part.writers[static_cast<size_t>(home.rank)].add(
        static_cast<int32_t>(token), {slot, k, home.local, weight}
    );
  }

  PlanData& plan_;
  const RouteTable& routes_;
  size_t topk_;
  std::vector<Home> homes_;  // [num_experts]
  bool is_rank_major_ = false;
  bool drops_ = false;  // then a route's place is known only once all before it are placed
};

}  // namespace

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

PlanData place_routes(
    const RouteTable& routes,
    std::span<const RankCounts> counts,
    int rank,
    const PlanOptions& options,
    const Context& context,
    const Sharing& sharing
) {
  const auto num_experts = static_cast<int>(counts[static_cast<size_t>(rank)].routes.size());
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

  RoutePlacer(plan, routes, group)
      .run(
          counts[static_cast<size_t>(rank)],
          first_slots(group, earlier, options.layout == Layout::kRankMajor),
          sharing
      );
  link_tokens(plan);
  return plan;
}

void link_tokens(PlanData& plan) {
  std::vector<std::span<const int32_t>> tokens;
  for (const Arrivals& arrivals : plan.sent) {
    tokens.emplace_back(arrivals.token);
  }
  group_by_token<TokenArrival>(
      tokens,
      plan.shape.num_tokens,
      plan.token_begin,
      plan.token_arrivals,
      [](size_t rank, size_t i) {
        return TokenArrival{static_cast<int32_t>(rank), static_cast<int32_t>(i)};
      }
  );
}

void add_received(PlanData& plan, std::vector<Arrivals> received) {
  plan.received = std::move(received);
  if (plan.shape.options.layout != Layout::kRankMajor) {
    return;
  }
  // Only arrivals tell which routes of a dropped row are gone.
  plan.rows_per_expert.assign(plan.rows_per_expert.size(), 0);
  plan.row_experts.assign(
      static_cast<size_t>(plan.num_rows) * static_cast<size_t>(plan.shape.topk), -1
  );
  for (const Arrivals& from : plan.received) {
    for (size_t i = 0; i < from.slot.size(); ++i) {
      const auto row = static_cast<size_t>(from.slot[i]) * static_cast<size_t>(plan.shape.topk);
      plan.row_experts[row + static_cast<size_t>(from.k[i])] = from.expert[i];
      ++plan.rows_per_expert[static_cast<size_t>(from.expert[i])];
    }
  }
  plan.padded_rows_per_expert = plan.rows_per_expert;
}

namespace {

// Returns all ranks' routes to physical experts; `counts` and `options` become those of them.
std::vector<RouteTable> balance_all(
    std::span<const RouteTable> routes,
    std::vector<RankCounts>& counts,
    std::vector<PlanOptions>& options
) {
  const auto num_ranks = static_cast<int>(routes.size());
  const auto num_experts = static_cast<int>(counts[0].routes.size());
  check_balancing(options[0].balance, num_ranks, num_experts, {});
  const Balance balance = balance_counts(counts, options[0].balance, {});
  std::vector<RouteTable> physical;
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    physical.push_back(physical_routes(routes[rank], balance, static_cast<int>(rank)));
    options[rank] = resolved_options(options[rank], balance);
    const int num_physical = balance.placement.shape.count();
    counts[rank] = count_routes(physical[rank], num_physical, num_ranks, options[rank]);
  }
  return physical;
}

}  // namespace

std::vector<Plan> build_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets
) {
  const auto num_ranks = static_cast<int>(routes.size());
  const auto require = [](bool is_good, const std::string& problem) {
    WEFT_CHECK_ARG(Context{}, is_good, "plan: {}", problem);
  };
  require(num_ranks > 0, "no rank's routing is given (at least one)");
  require(
      num_experts > 0 && num_experts % num_ranks == 0,
      fmt::format(
          "num_experts = {} is not a positive multiple of num_ranks = {}", num_experts, num_ranks
      )
  );
  require(
      row_budgets.empty() || row_budgets.size() == routes.size(),
      fmt::format("{} row budgets for {} ranks", row_budgets.size(), num_ranks)
  );
  std::vector<PlanOptions> options_of(routes.size(), options);
  std::vector<RankCounts> counts;
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    const int topk = routes[rank].topk;
    require(
        topk == routes[0].topk,
        fmt::format("topk = {} on rank {} ({} on rank 0)", topk, rank, routes[0].topk)
    );
    if (!row_budgets.empty()) {
      const int64_t budget = row_budgets[rank];
      options_of[rank].row_budget = budget < 0 ? std::nullopt : std::optional(budget);
    }
    check_options(options_of[rank], {});
    counts.push_back(count_routes(routes[rank], num_experts, num_ranks, options_of[rank]));
  }

  std::vector<RouteTable> physical;
  if (options.balance.replicas > 0) {
    physical = balance_all(routes, counts, options_of);
    routes = physical;
  }

  std::vector<PlanData> plans;
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    plans.push_back(place_routes(routes[rank], counts, static_cast<int>(rank), options_of[rank], {})
    );
  }
  for (size_t to = 0; to < plans.size(); ++to) {
    std::vector<Arrivals> received;
    for (const PlanData& from : plans) {
      received.push_back(from.sent[to]);
    }
    add_received(plans[to], std::move(received));
  }
  std::vector<Plan> finished;
  for (PlanData& plan : plans) {
    finished.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  return finished;
}

}  // namespace weft
