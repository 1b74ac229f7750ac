// SPDX-License-Identifier: Apache-2.0
// Routing and plans as they are followed when ranks are lost.
#pragma once

#include <functional>
#include <span>

#include "plan/build.hpp"
#include "plan/plan_data.hpp"

namespace weft {

using IsLost = std::function<bool(int rank)>;
[[nodiscard]] inline bool none_is_lost(int /*rank*/) {
  return false;
}

// Drops routes to `experts`, ascending, as experts_without_copy() has them: their places then name
// no expert.
void drop_routes_to(std::span<const int32_t> experts, RouteTable& routes);

// Returns the plan with nothing to and from ranks that are lost. Slots stay as they are; rows of
// lost ranks become padding, which dispatch fills with zeros. Counts of the whole group's rows
// stay. Nothing is forwarded between domains any more, since what a lost forwarder knew is lost,
// too: rows go straight from their source, and the sums are those of one domain.
[[nodiscard]] PlanData without(const IsLost& is_lost, const PlanData& plan);
// Returns whether without() would change anything.
[[nodiscard]] bool has_traffic_with(const IsLost& is_lost, const PlanData& plan);

}  // namespace weft
