// SPDX-License-Identifier: Apache-2.0
#include "unit/plan/plan_cases.hpp"

#include <algorithm>
#include <limits>

#include "plan/plan_data.hpp"
#include "plan/random_routing.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft::testing {
namespace {

template <class T>
T pick(RandomSource& random, std::initializer_list<T> values) {
  return *(values.begin() + random.below(values.size()));
}

std::vector<RouteTable> random_tables(RandomSource& random, int num_ranks, int num_experts) {
  RandomRouting spec;
  spec.num_experts = num_experts;
  spec.repeat_experts = random.below(3) == 0;
  spec.topk = pick(random, {1, 2, 3, 8, 32});
  if (!spec.repeat_experts) {
    spec.topk = std::min(spec.topk, num_experts);
  }
  spec.popularity = pick(random, {Popularity::kUniform, Popularity::kZipf, Popularity::kOneExpert});
  spec.zipf_exponent = pick(random, {0.5, 1.0, 2.5});
  spec.hole_fraction = pick(random, {0.0, 0.2, 0.9, 1.0});
  spec.with_weights = random.below(2) == 0;
  spec.seed = random.next();
  std::vector<RouteTable> tables;
  for (int rank = 0; rank < num_ranks; ++rank) {
    spec.num_tokens = pick(random, {0, 1, 7, 40});
    tables.push_back(random_routing(spec, rank));
  }
  return tables;
}

PlanOptions random_options(RandomSource& random) {
  PlanOptions options;
  options.layout = pick(random, {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided});
  if (options.layout != Layout::kRankMajor) {
    options.pad_multiple = pick<int64_t>(random, {1, 2, 3, 16, 128});
  }
  if (options.layout == Layout::kExpertStrided) {
    options.expert_stride = pick<int64_t>(random, {0, 1, 5, 16, 300});
  }
  return options;
}

// Exact, one row short, far too small, none at all, or generous: a different one for each rank.
std::vector<int64_t> random_budgets(RandomSource& random, const PlanCase& c) {
  std::vector<int64_t> budgets;
  for (const PlanData& plan : slow_plans(c)) {
    const int64_t need = plan.required_rows;
    budgets.push_back(
        std::max<int64_t>(-1, pick<int64_t>(random, {-1, need, need - 1, need / 2, 0, need + 3}))
    );
  }
  return budgets;
}

}  // namespace

PlanCase random_case(uint64_t seed) {
  RandomSource random(seed);
  const auto num_ranks = static_cast<int>(random.between(1, 8));
  PlanCase c;
  c.num_experts = num_ranks * pick(random, {1, 2, 5});
  c.routes = random_tables(random, num_ranks, c.num_experts);
  c.options = random_options(random);
  if (c.options.layout != Layout::kExpertStrided && random.below(2) == 0) {
    c.row_budgets = random_budgets(random, c);
  }
  return c;
}

std::string describe(const PlanCase& c) {
  std::string text = fmt::format(
      "{} ranks, {} experts, topk {}, {}, pad {}, stride {}, tokens",
      c.num_ranks(),
      c.num_experts,
      c.routes.front().topk,
      layout_name(c.options.layout),
      c.options.pad_multiple,
      c.options.expert_stride
  );
  for (const RouteTable& table : c.routes) {
    text += fmt::format(" {}", table.num_tokens);
  }
  text += ", budgets";
  for (const int64_t budget : c.row_budgets) {
    text += fmt::format(" {}", budget);
  }
  return text;
}

std::vector<PlanData> fast_plans(const PlanCase& c) {
  std::vector<PlanData> plans;
  for (const Plan& plan : build_plans(c.routes, c.num_experts, c.options, c.row_budgets)) {
    plans.push_back(contents_of(plan));
  }
  return plans;
}

std::vector<PlanData> slow_plans(const PlanCase& c) {
  return reference_plans(c.routes, c.num_experts, c.options, c.row_budgets);
}

::testing::AssertionResult same_plan(const PlanData& fast, const PlanData& slow) {
  if (fast == slow) {
    return ::testing::AssertionSuccess();
  }
  auto failure = ::testing::AssertionFailure() << "rank " << fast.shape.rank << " differs in";
  const auto compare = [&failure](const char* name, const auto& a, const auto& b) {
    if (!(a == b)) {
      failure << ' ' << name;
      if constexpr (requires { ::testing::PrintToString(a); }) {
        failure << " (" << ::testing::PrintToString(a) << " against " << ::testing::PrintToString(b)
                << ')';
      }
    }
  };
  compare("num_rows", fast.num_rows, slow.num_rows);
  compare("required_rows", fast.required_rows, slow.required_rows);
  compare("overflow", fast.overflow, slow.overflow);
  compare("rows_per_expert", fast.rows_per_expert, slow.rows_per_expert);
  compare("padded_rows_per_expert", fast.padded_rows_per_expert, slow.padded_rows_per_expert);
  compare("expert_begin", fast.expert_begin, slow.expert_begin);
  compare("row_experts", fast.row_experts, slow.row_experts);
  compare("global_routes", fast.global_routes, slow.global_routes);
  compare("route_expert", fast.route_expert, slow.route_expert);
  compare("route_slot", fast.route_slot, slow.route_slot);
  compare("token_begin", fast.token_begin, slow.token_begin);
  compare("padding", fast.padding, slow.padding);
  compare("sent", fast.sent == slow.sent, true);
  compare("received", fast.received == slow.received, true);
  compare("token_arrivals", fast.token_arrivals == slow.token_arrivals, true);
  return failure << " or shape";
}

RouteTable table_of(int topk, const std::vector<std::vector<int32_t>>& rows) {
  RouteTable table;
  table.num_tokens = static_cast<int64_t>(rows.size());
  table.topk = topk;
  for (const std::vector<int32_t>& row : rows) {
    table.expert.insert(table.expert.end(), row.begin(), row.end());
  }
  return table;
}

std::vector<Plan> sample_plans(const PlanOptions& options) {
  std::vector<RouteTable> routes = {
      table_of(2, {{0, 1}, {2, 0}}), table_of(2, {{1, -1}, {0, 0}, {3, 2}})};
  for (RouteTable& table : routes) {
    table.weight.assign(table.expert.size(), 0.1F);
  }
  routes[0].weight[0] = std::numeric_limits<float>::quiet_NaN();
  routes[0].weight[1] = -std::numeric_limits<float>::infinity();
  routes[0].weight[2] = std::numeric_limits<float>::denorm_min();
  routes[0].weight[3] = -0.0F;
  return build_plans(routes, 4, options);
}

}  // namespace weft::testing
