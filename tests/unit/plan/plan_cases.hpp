// SPDX-License-Identifier: Apache-2.0
// Random planning problems, and a comparison that names the first difference.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plan/build.hpp"
#include "plan/random_routing.hpp"

namespace weft::testing {

struct PlanCase {
  std::vector<RouteTable> routes;  // by rank
  int num_experts = 0;
  PlanOptions options;
  std::vector<int64_t> row_budgets;  // by rank, -1: exact; empty: all exact

  [[nodiscard]] int num_ranks() const { return static_cast<int>(routes.size()); }
};

// Sizes, layout, padding, budget and popularity all follow from the seed. Small, often degenerate.
[[nodiscard]] PlanCase random_case(uint64_t seed);

// Returns a description of the case, for failure messages.
[[nodiscard]] std::string describe(const PlanCase& c);

// The plans of all ranks by the fast path, and by the reference.
[[nodiscard]] std::vector<PlanData> fast_plans(const PlanCase& c);
[[nodiscard]] std::vector<PlanData> slow_plans(const PlanCase& c);

// Names the first field that differs.
[[nodiscard]] ::testing::AssertionResult same_plan(const PlanData& fast, const PlanData& slow);

// Builds a table by hand: one row of experts for each token.
[[nodiscard]] RouteTable table_of(int topk, const std::vector<std::vector<int32_t>>& rows);

// Two ranks, two experts each, three weights that are hard to write down.
[[nodiscard]] std::vector<Plan> sample_plans(const PlanOptions& options = {});

// The message that `call` throws, up to " at file:line"; "nothing" if it returns.
template <class Call>
[[nodiscard]] std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.substr(0, text.rfind(" at "));
  }
  return "nothing";
}

}  // namespace weft::testing
