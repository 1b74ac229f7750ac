// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "plan/json_node.hpp"
#include "plan/plan_data.hpp"

namespace weft {

inline constexpr std::string_view kPlanFormat = "weft plan";
inline constexpr int kPlanVersion = 1;

// Checks every size and bound, so that executors may follow the plan. Throws Error (kFile).
[[nodiscard]] PlanData plan_from_json(const JsonNode& whole);

}  // namespace weft
