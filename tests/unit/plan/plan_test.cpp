// SPDX-License-Identifier: Apache-2.0
// The fast plan against the reference, and what must hold of any plan.
#include <algorithm>
#include <numeric>
#include <set>

#include "plan/random_routing.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::fast_plans;
using testing::message_of;
using testing::PlanCase;
using testing::random_case;
using testing::same_plan;
using testing::slow_plans;
using testing::table_of;

constexpr uint64_t kNumCases = 600;

TEST(PlanTest, EqualsReferenceOnRandomCases) {
  int num_overflows = 0;
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    const PlanCase c = random_case(seed);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(c)));
    const std::vector<PlanData> fast = fast_plans(c);
    const std::vector<PlanData> slow = slow_plans(c);
    for (size_t rank = 0; rank < fast.size(); ++rank) {
      ASSERT_TRUE(same_plan(fast[rank], slow[rank]));
      num_overflows += fast[rank].overflow ? 1 : 0;
    }
  }
  EXPECT_GT(num_overflows, 100);  // dropping is part of the cases
}

TEST(PlanTest, EqualsReferenceWithReplicas) {
  int num_replicas = 0;
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    PlanCase c = random_case(seed);
    c.options.balance.replicas = 1 + static_cast<int>(seed % 3);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(c)));
    const std::vector<PlanData> fast = fast_plans(c);
    const std::vector<PlanData> slow = slow_plans(c);
    for (size_t rank = 0; rank < fast.size(); ++rank) {
      ASSERT_TRUE(same_plan(fast[rank], slow[rank]));
      const auto& placement = fast[rank].shape.options.balance.placement;
      num_replicas += static_cast<int>(std::ranges::count_if(placement, [](int32_t expert) {
        return expert >= 0;
      }));
    }
  }
  EXPECT_GT(num_replicas, 100);
}

// A budget that holds what the planner says drops nothing, however experts are padded.
TEST(PlanTest, NeedsTheRowsThatThePlannerSaysAndPadding) {
  int num_cases = 0;
  for (uint64_t seed = 0; num_cases < 1000; ++seed) {
    PlanCase c = random_case(seed);
    if (c.options.layout != Layout::kExpertMajor) {
      continue;
    }
    ++num_cases;
    c.options.balance.replicas = 1 + static_cast<int>(seed % 3);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(c)));
    const std::vector<Plan> exact = build_plans(c.routes, c.num_experts, c.options);
    const int64_t busiest = exact[0].load().busiest;
    c.options.row_budget = busiest + exact[0].num_local_experts() * (c.options.pad_multiple - 1);
    for (const Plan& plan : build_plans(c.routes, c.num_experts, c.options)) {
      ASSERT_EQ(plan.load().busiest, busiest);
      ASSERT_LE(busiest, plan.load().unbalanced);
      const auto rows = plan.rows_per_expert();
      ASSERT_LE(std::reduce(rows.begin(), rows.end()), busiest);
      ASSERT_FALSE(plan.overflow());
    }
  }
}

TEST(PlanTest, GivesEachRouteADistinctSlot) {
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    const PlanCase c = random_case(seed);
    if (c.options.layout == Layout::kRankMajor) {
      continue;
    }
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(c)));
    for (const PlanData& plan : fast_plans(c)) {
      std::set<int64_t> slots;
      int64_t kept = 0;
      for (const Arrivals& from : plan.received) {
        slots.insert(from.slot.begin(), from.slot.end());
        kept += from.num_routes();
      }
      ASSERT_EQ(std::ssize(slots), kept);
      ASSERT_TRUE(slots.empty() || (*slots.begin() >= 0 && *slots.rbegin() < plan.num_rows));
      for (const auto& [begin, end] : plan.padding) {
        ASSERT_LT(begin, end);
        ASSERT_LE(end, plan.num_rows);
        ASSERT_EQ(slots.lower_bound(begin), slots.lower_bound(end)) << "padding holds a token";
      }
    }
  }
}

TEST(PlanTest, KeepsSlotsOfAnExpertInSourceTokenAndKOrder) {
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    const PlanCase c = random_case(seed);
    SCOPED_TRACE(fmt::format("seed {}: {}", seed, describe(c)));
    const bool one_row = c.options.layout == Layout::kRankMajor;
    for (const PlanData& plan : fast_plans(c)) {
      std::vector<int64_t> last(plan.rows_per_expert.size(), -1);
      int64_t last_row = -1;
      for (const Arrivals& from : plan.received) {
        for (int64_t i = 0; i < from.size(); ++i) {
          const auto first = static_cast<size_t>(from.route_begin[static_cast<size_t>(i)]);
          const auto end = static_cast<size_t>(from.route_begin[static_cast<size_t>(i) + 1]);
          ASSERT_LT(first, end);
          if (one_row) {
            ASSERT_EQ(from.slots(i).size(), 1U);
            ASSERT_EQ(from.slots(i)[0], ++last_row);
            continue;
          }
          ASSERT_EQ(from.slots(i).size(), end - first);
          for (size_t r = first; r < end; ++r) {
            int64_t& previous = last[static_cast<size_t>(from.expert[r])];
            ASSERT_GT(from.slot[r], previous);
            previous = from.slot[r];
          }
        }
      }
    }
  }
}

TEST(PlanTest, GivesSenderAndReceiverEqualArrivals) {
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    const std::vector<PlanData> plans = fast_plans(random_case(seed));
    for (size_t from = 0; from < plans.size(); ++from) {
      for (size_t to = 0; to < plans.size(); ++to) {
        ASSERT_EQ(plans[from].sent[to], plans[to].received[from]) << "seed " << seed;
      }
    }
  }
}

TEST(PlanTest, AgreesWithReferenceAboutErrorOverflow) {
  for (uint64_t seed = 0; seed < kNumCases / 2; ++seed) {
    PlanCase c = random_case(seed);
    const std::vector<PlanData> slow = slow_plans(c);
    const bool drops = std::ranges::any_of(slow, &PlanData::overflow);
    c.options.overflow = Overflow::kError;
    const std::string message = message_of([&] { static_cast<void>(fast_plans(c)); });
    ASSERT_EQ(message != "nothing", drops) << "seed " << seed << ": " << message;
  }
}

TEST(PlanTest, PlansNothingForNoTokens) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    PlanCase c;
    c.num_experts = 4;
    c.routes = {table_of(2, {}), table_of(2, {})};
    c.options.layout = layout;
    for (const PlanData& plan : fast_plans(c)) {
      EXPECT_EQ(plan.num_rows, 0);
      EXPECT_FALSE(plan.overflow);
      EXPECT_TRUE(plan.token_arrivals.empty());
      EXPECT_TRUE(plan.padding.empty());
    }
  }
}

// Two ranks, two experts each; written out by hand.
class SmallPlanTest : public ::testing::Test {
 protected:
  std::vector<Plan> plan(const PlanOptions& options) const {
    return build_plans(
        std::vector{table_of(2, {{0, 1}, {2, 0}}), table_of(2, {{1, -1}, {0, 0}, {3, 2}})},
        4,
        options
    );
  }
};

TEST_F(SmallPlanTest, PadsExpertBlocks) {
  PlanOptions options;
  options.pad_multiple = 4;
  const std::vector<Plan> plans = plan(options);
  // Expert 0: rank 0 tokens 0 and 1, rank 1 token 1 twice. Expert 1: rank 0 token 0, rank 1 token
  // 0.
  EXPECT_EQ(plans[0].num_rows(), 8);
  EXPECT_TRUE(std::ranges::equal(plans[0].rows_per_expert(), std::vector{4, 2}));
  EXPECT_TRUE(std::ranges::equal(plans[0].padded_rows_per_expert(), std::vector{4, 4}));
  EXPECT_TRUE(std::ranges::equal(plans[0].expert_begin(), std::vector{0, 4}));
  EXPECT_TRUE(std::ranges::equal(plans[0].route_slots(), std::vector{0, 4, 0, 1}));
  EXPECT_TRUE(std::ranges::equal(plans[1].route_slots(), std::vector{5, -1, 2, 3, 4, 1}));
  EXPECT_EQ(contents_of(plans[0]).padding, (std::vector<std::pair<int64_t, int64_t>>{{6, 8}}));
  EXPECT_EQ(plans[0].sent_arrivals(1), 1);
  EXPECT_EQ(plans[0].received_arrivals(1), 2);
  EXPECT_EQ(plans[0].wire_bytes(16), 16);
  EXPECT_EQ(plans[0].logical_bytes(16), 6 * 16);
}

// Rank 1's tokens have two routes of three, all three, none and one that lead to rank 0.
TEST(ReturnedBytesTest, CountsARowForEachRouteOrForAllOfAToken) {
  const std::vector<RouteTable> routes = {
      table_of(3, {}), table_of(3, {{0, 2, 1}, {0, 1, 1}, {2, 3, -1}, {-1, 0, -1}})};
  const auto returned = [&](SumOrder order) {
    return build_plans(routes, 4, {.order = order})[1].returned_bytes(16);
  };
  EXPECT_EQ(returned(SumOrder::kRank), 3 * 16);
  EXPECT_EQ(returned(SumOrder::kTopk), 4 * 16);
}

TEST_F(SmallPlanTest, GivesEachArrivalOneRowByRank) {
  PlanOptions options;
  options.layout = Layout::kRankMajor;
  const std::vector<Plan> plans = plan(options);
  EXPECT_EQ(plans[0].num_rows(), 4);
  EXPECT_TRUE(std::ranges::equal(plans[0].route_slots(), std::vector{0, 0, 0, 1}));
  EXPECT_TRUE(std::ranges::equal(plans[1].route_slots(), std::vector{2, -1, 3, 3, 1, 1}));
  EXPECT_TRUE(std::ranges::equal(plans[0].row_experts(), std::vector{0, 1, -1, 0, 1, -1, 0, 0}));
  EXPECT_TRUE(std::ranges::equal(plans[0].rows_per_expert(), std::vector{4, 2}));
  EXPECT_EQ(plans[0].row_weight_cols(), 2);
  EXPECT_EQ(plans[0].logical_bytes(16), 4 * 16);
}

TEST_F(SmallPlanTest, StartsStridedBlocksAtMultiplesOfTheStride) {
  PlanOptions options;
  options.layout = Layout::kExpertStrided;
  options.expert_stride = 3;
  const std::vector<Plan> plans = plan(options);
  EXPECT_EQ(plans[0].num_rows(), 6);
  EXPECT_TRUE(std::ranges::equal(plans[0].route_slots(), std::vector{0, 3, 0, 1}));
  EXPECT_TRUE(std::ranges::equal(plans[1].route_slots(), std::vector{4, -1, 2, -1, 3, 1}));
  EXPECT_TRUE(plans[0].overflow());
  EXPECT_TRUE(plans[1].overflow()) << "its route was dropped on rank 0";
  EXPECT_EQ(plans[0].required_rows(), 8);
}

TEST_F(SmallPlanTest, ResolvesStrideZeroToTheLargestExpertOfTheGroup) {
  PlanOptions options;
  options.layout = Layout::kExpertStrided;
  options.pad_multiple = 3;
  for (const Plan& one : plan(options)) {
    EXPECT_EQ(contents_of(one).shape.options.expert_stride, 6);
    EXPECT_EQ(one.num_rows(), 12);
    EXPECT_EQ(one.required_rows(), 12);
    EXPECT_FALSE(one.overflow());
  }
}

TEST_F(SmallPlanTest, DropsLateExpertsFirstWhenOneRowIsMissing) {
  const std::vector<RouteTable> routes = {
      table_of(2, {{0, 1}, {2, 0}}), table_of(2, {{1, -1}, {0, 0}, {3, 2}})};
  const std::vector<int64_t> budgets = {5, -1};
  const std::vector<Plan> plans = build_plans(routes, 4, {}, budgets);
  EXPECT_EQ(plans[0].num_rows(), 5);
  EXPECT_EQ(plans[0].required_rows(), 6);
  EXPECT_TRUE(plans[0].overflow());
  EXPECT_TRUE(plans[1].overflow());
  EXPECT_TRUE(std::ranges::equal(plans[0].rows_per_expert(), std::vector{4, 1}));
  // Its only route is gone, so the arrival is not listed.
  EXPECT_EQ(plans[1].sent_arrivals(0), 1);
}

TEST_F(SmallPlanTest, LeavesRanksWithoutLossUnflagged) {
  const std::vector<RouteTable> routes = {
      table_of(1, {{0}, {0}}), table_of(1, {{1}}), table_of(1, {{2}})};
  const std::vector<int64_t> budgets = {1, -1, -1};
  const std::vector<Plan> plans = build_plans(routes, 3, {}, budgets);
  EXPECT_TRUE(plans[0].overflow());
  EXPECT_FALSE(plans[1].overflow());
  EXPECT_FALSE(plans[2].overflow());
}

TEST(PlanTest, KeepsWhatFitsBesidePaddingCutByTheBudget) {
  PlanOptions options;
  options.pad_multiple = 8;
  options.row_budget = 3;
  options.overflow = Overflow::kError;  // only padding is cut, no route is lost
  const std::vector<Plan> plans = build_plans(std::vector{table_of(1, {{0}, {0}})}, 1, options);
  EXPECT_FALSE(plans[0].overflow());
  EXPECT_EQ(plans[0].required_rows(), 8);
  EXPECT_TRUE(std::ranges::equal(plans[0].padded_rows_per_expert(), std::vector{3}));
}

TEST(PlanTest, ListsTokenArrivalsByAscendingRank) {
  const std::vector<Plan> plans = build_plans(
      std::vector{
          table_of(3, {{2, 0, 1}, {-1, -1, -1}, {1, 1, 0}}), table_of(3, {}), table_of(3, {})},
      3,
      {}
  );
  const PlanData& plan = contents_of(plans[0]);
  EXPECT_EQ(plan.token_begin, (std::vector<int32_t>{0, 3, 3, 5}));
  const std::vector<TokenArrival> expected = {{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}};
  EXPECT_EQ(plan.token_arrivals, expected);
}

TEST(PlanTest, DoesNotChangeARanksRoutesWithOtherRanksOrderOfCalls) {
  RandomRouting spec;
  spec.num_tokens = 50;
  spec.num_experts = 8;
  spec.topk = 3;
  const std::vector<RouteTable> routes = {random_routing(spec, 0), random_routing(spec, 1)};
  EXPECT_EQ(build_plans(routes, 8, {})[1], build_plans(routes, 8, {})[1]);
}

// However many threads share the work, in whatever order, also where rows are dropped.
TEST(PlanTest, IsTheSameInAnyNumberOfParts) {
  const auto backwards = [](size_t count, const auto& visit) {
    for (size_t i = count; i-- > 0;) {
      visit(i);
    }
  };
  for (uint64_t seed = 0; seed < kNumCases; ++seed) {
    const PlanCase c = random_case(seed);
    std::vector<PlanOptions> options(c.routes.size(), c.options);
    std::vector<RankCounts> counts;
    for (size_t rank = 0; rank < c.routes.size(); ++rank) {
      if (!c.row_budgets.empty() && c.row_budgets[rank] >= 0) {
        options[rank].row_budget = c.row_budgets[rank];
      }
      counts.push_back(count_routes(c.routes[rank], c.num_experts, c.num_ranks(), options[rank]));
    }
    for (int rank = 0; rank < c.num_ranks(); ++rank) {
      const auto place = [&](size_t num_parts) {
        const auto r = static_cast<size_t>(rank);
        return place_routes(
            c.routes[r],
            counts,
            rank,
            options[r],
            {},
            {.num_parts = num_parts, .for_each = backwards}
        );
      };
      const PlanData one = place(1);
      for (const size_t num_parts : {2U, 3U, 50U}) {
        ASSERT_TRUE(same_plan(place(num_parts), one)) << num_parts << " parts of " << describe(c);
      }
    }
  }
}

}  // namespace
}  // namespace weft
