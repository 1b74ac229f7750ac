// SPDX-License-Identifier: Apache-2.0
// Plans of all ranks of several domains, made without an exchange, and what the routing alone says
// of each token.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/random_routing.hpp"

namespace weft::test {

struct PlanVariant {
  std::string name;
  PlanOptions options;
  bool has_drops = false;
  bool from_map = false;
  bool has_weights = true;
};

// All layouts, exact and with drops, indices and maps, with and without weights.
inline const std::vector<PlanVariant>& plan_variants() {
  static const std::vector<PlanVariant> all = {
      {.name = "rank major", .options = {.layout = Layout::kRankMajor}},
      {.name = "expert major", .options = {.pad_multiple = 4}},
      {.name = "expert strided", .options = {.layout = Layout::kExpertStrided, .pad_multiple = 8}},
      {.name = "rank major, drops",
       .options = {.layout = Layout::kRankMajor},
       .has_drops = true,
       .has_weights = false},
      {.name = "expert major, drops", .options = {.pad_multiple = 4}, .has_drops = true},
      {.name = "expert strided, drops",
       .options = {.layout = Layout::kExpertStrided, .expert_stride = 60},
       .has_drops = true},
      {.name = "map", .options = {.pad_multiple = 4}, .from_map = true},
      {.name = "map, drops, no weights",
       .options = {.layout = Layout::kRankMajor},
       .has_drops = true,
       .from_map = true,
       .has_weights = false},
  };
  return all;
}

// A kept route of a token, as its receiver knows it.
struct KeptRoute {
  int32_t slot = 0;
  int32_t k = 0;
  int32_t expert = 0;  // local
  float weight = 0.0F;
};

class DomainPlans {
 public:
  static constexpr int kTopk = 3;
  // Enough for chunks of several tokens, also where only some cross.
  static constexpr int kManyTokens = 1100;

  // `domains` as Topology::domains. Rank 1 has no tokens.
  DomainPlans(const std::vector<std::vector<int>>& domains, const PlanVariant& variant) {
    for (const auto& members : domains) {
      num_ranks_ += static_cast<int>(members.size());
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      RouteTable table = random_routing(
          {.num_tokens = rank == 0   ? kManyTokens
                         : rank == 1 ? 0
                                     : 40 + rank,
           .num_experts = 2 * num_ranks_,
           .topk = kTopk,
           .hole_fraction = 0.3,
           .repeat_experts = !variant.from_map,
           .with_weights = variant.has_weights,
           .seed = 7},
          rank
      );
      tables_.push_back(variant.from_map ? as_map(std::move(table)) : std::move(table));
    }
    std::vector<int64_t> budgets;
    if (variant.has_drops && variant.options.layout != Layout::kExpertStrided) {
      for (const Plan& plan : build_plans(tables_, 2 * num_ranks_, variant.options)) {
        budgets.push_back(plan.rank() % 2 == 0 ? plan.required_rows() / 2 : -1);
      }
    }
    for (const Plan& plan : build_plans(tables_, 2 * num_ranks_, variant.options, budgets)) {
      plans_.push_back(contents_of(plan));
    }
    for (PlanData& plan : plans_) {
      add_traffic(plan, domains);
    }
  }

  [[nodiscard]] int num_ranks() const { return num_ranks_; }
  [[nodiscard]] const PlanData& plan(int rank) const { return plans_[static_cast<size_t>(rank)]; }

  // Kept routes of a token to `receiver`, ascending slot, then k.
  [[nodiscard]] std::vector<KeptRoute> routes(int source, int32_t token, int receiver) const {
    const RouteTable& table = tables_[static_cast<size_t>(source)];
    const int per_rank = plan(source).shape.num_local_experts();
    std::vector<KeptRoute> kept;
    for (int32_t k = 0; k < kTopk; ++k) {
      const auto route = static_cast<size_t>(token * kTopk + k);
      const int32_t slot = plan(source).route_slot[route];
      if (slot >= 0 && table.expert[route] / per_rank == receiver) {
        const float weight = table.weight.empty() ? 0.0F : table.weight[route];
        kept.push_back({slot, k, table.expert[route] % per_rank, weight});
      }
    }
    std::ranges::sort(kept, [](const KeptRoute& a, const KeptRoute& b) {
      return std::tie(a.slot, a.k) < std::tie(b.slot, b.k);
    });
    return kept;
  }

  // Tokens of `source` with a kept route to any of `members`, ascending.
  [[nodiscard]] std::vector<int32_t> tokens_into(int source, const std::vector<int>& members)
      const {
    std::set<int32_t> tokens;
    for (int32_t token = 0; token < plan(source).shape.num_tokens; ++token) {
      for (const int member : members) {
        if (!routes(source, token, member).empty()) {
          tokens.insert(token);
        }
      }
    }
    return {tokens.begin(), tokens.end()};
  }

 private:
  // Set experts ascending, then holes.
  static RouteTable as_map(RouteTable table) {
    const auto topk = static_cast<size_t>(table.topk);
    for (size_t first = 0; first < table.expert.size(); first += topk) {
      std::vector<std::pair<uint32_t, float>> row;  // a hole is the largest
      for (size_t route = first; route < first + topk; ++route) {
        const float weight = table.weight.empty() ? 0.0F : table.weight[route];
        row.emplace_back(static_cast<uint32_t>(table.expert[route]), weight);
      }
      std::ranges::sort(row);
      for (size_t k = 0; k < topk; ++k) {
        table.expert[first + k] = static_cast<int32_t>(row[k].first);
        if (!table.weight.empty()) {
          table.weight[first + k] = row[k].second;
        }
      }
    }
    table.from_map = true;
    return table;
  }

  void add_traffic(PlanData& plan, const std::vector<std::vector<int>>& groups) {
    auto domains = std::make_shared<const Domains>(groups, plan.shape.rank);
    std::vector<std::vector<Arrivals>> forwarded;
    for (const int source : domains->forwarded()) {
      auto& pairs = forwarded.emplace_back();
      const std::vector<Arrivals>& sent = plans_[static_cast<size_t>(source)].sent;
      for (const int member : domains->near()) {
        const bool is_own = member == plan.shape.rank;
        pairs.push_back(is_own ? Arrivals() : sent[static_cast<size_t>(member)]);
      }
    }
    plan.between = make_domain_traffic(plan, domains, std::move(forwarded));
  }

  int num_ranks_ = 0;
  std::vector<RouteTable> tables_;
  std::vector<PlanData> plans_;
};

}  // namespace weft::test
