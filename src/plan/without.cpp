// SPDX-License-Identifier: Apache-2.0
#include "plan/without.hpp"

#include <algorithm>

namespace weft {
namespace {

using Rows = std::pair<int64_t, int64_t>;

// Sorts ranges and joins neighbours.
std::vector<Rows> merged(std::vector<Rows> ranges) {
  std::ranges::sort(ranges);
  std::vector<Rows> merged;
  for (const Rows& range : ranges) {
    if (!merged.empty() && merged.back().second >= range.first) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

}  // namespace

void drop_routes_to(std::span<const int32_t> experts, RouteTable& routes) {
  std::ranges::replace_if(
      routes.expert, [&](int32_t expert) { return std::ranges::binary_search(experts, expert); }, -1
  );
}

bool has_traffic_with(const IsLost& is_lost, const PlanData& plan) {
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    if (is_lost(static_cast<int>(rank)) &&
        plan.sent[rank].size() + plan.received[rank].size() > 0) {
      return true;
    }
  }
  return false;
}

PlanData without(const IsLost& is_lost, const PlanData& plan) {
  PlanData rest = plan;
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    if (!is_lost(static_cast<int>(rank))) {
      continue;
    }
    rest.sent[rank] = no_arrivals(plan.shape);
    rest.received[rank] = no_arrivals(plan.shape);
    for (const int32_t row : plan.received[rank].slot) {
      rest.padding.emplace_back(row, row + 1);
      if (!plan.row_experts.empty()) {
        const auto topk = static_cast<ptrdiff_t>(plan.shape.topk);
        std::fill_n(rest.row_experts.begin() + row * topk, topk, -1);
      }
    }
  }
  rest.between = nullptr;
  rest.padding = merged(std::move(rest.padding));
  for (size_t route = 0; route < plan.route_expert.size(); ++route) {
    const int32_t expert = plan.route_expert[route];
    if (expert >= 0 && is_lost(expert / plan.shape.num_local_experts())) {
      rest.route_slot[route] = -1;
    }
  }
  link_tokens(rest);
  return rest;
}

}  // namespace weft
