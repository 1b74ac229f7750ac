// SPDX-License-Identifier: Apache-2.0
// Tests of what check_options refuses, and of what planning says when rows do not fit.
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::message_of;
using testing::table_of;

constexpr Context kSpeaker = {.rank = 2, .num_ranks = 8, .transport = "shm"};

std::string refusal(const PlanOptions& options) {
  return message_of([&] { check_options(options, kSpeaker); });
}

TEST(OptionsTest, AcceptsEveryLayout) {
  EXPECT_EQ(refusal({}), "nothing");
  EXPECT_EQ(refusal({.layout = Layout::kRankMajor, .row_budget = 0}), "nothing");
  EXPECT_EQ(refusal({.pad_multiple = 128, .row_budget = 2147483647}), "nothing");
  EXPECT_EQ(
      refusal({.layout = Layout::kExpertStrided, .pad_multiple = 8, .expert_stride = 64}), "nothing"
  );
}

TEST(OptionsTest, RefusesReplicasBetweenGpus) {
  const std::string text =
      "plan: balance with 2 replicas among GPUs of several hosts (balance needs one host, or "
      "tensors of the CPU) [rank 2/8, shm]";
  const PlanOptions options = {.balance = {.replicas = 2}};
  EXPECT_EQ(message_of([&] { check_options_between_gpus(options, kSpeaker); }), text);
  EXPECT_EQ(message_of([&] { check_options_between_gpus({}, kSpeaker); }), "nothing");
}

TEST(OptionsTest, RefusesPadMultiple) {
  EXPECT_EQ(
      refusal({.pad_multiple = 0}),
      "plan: pad_multiple = 0 is out of range (1 to 2147483647) [rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.layout = Layout::kRankMajor, .pad_multiple = 16}),
      "plan: pad_multiple = 16 (must be 1 with rank_major, whose rows have no expert blocks) [rank "
      "2/8, shm]"
  );
}

TEST(OptionsTest, RefusesStride) {
  EXPECT_EQ(
      refusal({.layout = Layout::kExpertStrided, .expert_stride = -1}),
      "plan: expert_stride = -1 is out of range (0 to 2147483647) [rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.expert_stride = 5}),
      "plan: expert_stride = 5 with expert_major (only expert_strided has a stride) [rank 2/8, shm]"
  );
}

TEST(OptionsTest, RefusesBudget) {
  EXPECT_EQ(
      refusal({.row_budget = -1}),
      "plan: row_budget = -1 is out of range (0 to 2147483647) [rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.layout = Layout::kExpertStrided, .row_budget = 10}),
      "plan: row_budget = 10 with expert_strided (its budget is expert_stride) [rank 2/8, shm]"
  );
}

TEST(OptionsTest, RefusesAnOrderOfSumsThatRankMajorCannotHave) {
  EXPECT_EQ(
      refusal({.layout = Layout::kRankMajor, .order = SumOrder::kTopk}),
      "plan: order = topk (must be rank with rank_major, whose rows are sums of a rank's experts) "
      "[rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.layout = Layout::kExpertStrided, .expert_stride = 64, .order = SumOrder::kTopk}),
      "nothing"
  );
}

TEST(OptionsTest, RefusesUnknownEnumerators) {
  EXPECT_EQ(
      refusal({.layout = static_cast<Layout>(7)}),
      "plan: layout = 7 is unknown (0 to 2) [rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.overflow = static_cast<Overflow>(3)}),
      "plan: overflow = 3 is unknown (0 or 1) [rank 2/8, shm]"
  );
  EXPECT_EQ(
      refusal({.order = static_cast<SumOrder>(9)}),
      "plan: order = 9 is unknown (0 or 1) [rank 2/8, shm]"
  );
}

TEST(OverflowTest, NamesTheFirstRankThatLacksRows) {
  const std::vector<RouteTable> routes(3, table_of(1, {{1}, {2}, {2}}));
  const std::vector<int64_t> budgets = {0, 2, 5};
  const std::string expected = "plan: rank 1 needs 3 rows (row_budget = 2)";
  EXPECT_EQ(
      message_of([&] {
        static_cast<void>(build_plans(routes, 3, {.overflow = Overflow::kError}, budgets));
      }),
      expected
  );
}

TEST(OverflowTest, SaysTheSameOnEveryRankButForTheSpeaker) {
  const RouteTable table = table_of(1, {{1}, {1}});
  const PlanOptions options = {.row_budget = 3, .overflow = Overflow::kError};
  const std::vector<RankCounts> counts(2, count_routes(table, 2, 2, options));
  for (int rank = 0; rank < 2; ++rank) {
    const Context speaker = {.rank = rank, .num_ranks = 2};
    EXPECT_EQ(
        message_of([&] { static_cast<void>(place_routes(table, counts, rank, options, speaker)); }),
        fmt::format("plan: rank 1 needs 4 rows (row_budget = 3) [rank {}/2]", rank)
    );
  }
}

TEST(OverflowTest, NamesTheExpertThatLacksStride) {
  const std::vector<RouteTable> routes(2, table_of(1, {{0}, {3}, {3}}));
  const PlanOptions options = {
      .layout = Layout::kExpertStrided, .expert_stride = 3, .overflow = Overflow::kError};
  EXPECT_EQ(
      message_of([&] { static_cast<void>(build_plans(routes, 4, options)); }),
      "plan: expert 3 on rank 1 needs 4 rows (expert_stride = 3)"
  );
}

TEST(OverflowTest, RefusesMoreRowsThanSlotsCanNumber) {
  const std::vector<RouteTable> routes = {table_of(2, {{0, 1}})};
  EXPECT_EQ(
      message_of([&] { static_cast<void>(build_plans(routes, 2, {.pad_multiple = 2000000000})); }),
      "plan: rank 0 needs 4000000000 rows (slots number at most 2147483647)"
  );
  const PlanOptions strided = {.layout = Layout::kExpertStrided, .expert_stride = 2147483647};
  EXPECT_EQ(
      message_of([&] { static_cast<void>(build_plans(routes, 2, strided)); }),
      "plan: rank 0 needs 4294967294 rows (slots number at most 2147483647)"
  );
}

TEST(OverflowTest, NeedsNoRoomForPaddingBeyondTheBudget) {
  const std::vector<RouteTable> routes = {table_of(2, {{0, 1}})};
  const std::vector<Plan> plans =
      build_plans(routes, 2, {.pad_multiple = 2000000000, .row_budget = 10});
  EXPECT_EQ(plans[0].required_rows(), 4000000000);
  EXPECT_EQ(plans[0].rows_per_expert()[1], 0);
  EXPECT_TRUE(plans[0].overflow());
}

TEST(OverflowTest, RefusesMalformedCountsOfAPeer) {
  const RouteTable table = table_of(1, {{0}});
  std::vector<RankCounts> counts(2, count_routes(table, 2, 2, {}));
  counts[1].routes[0] = -5;
  const auto place = [&] { static_cast<void>(place_routes(table, counts, 0, {}, {})); };
  EXPECT_EQ(message_of(place), "plan: the counts of rank 1 are malformed");
  counts[1].routes = {1};
  EXPECT_EQ(message_of(place), "plan: the counts of rank 1 are malformed");
}

TEST(OverflowTest, RefusesTablesThatDoNotFitTogether) {
  const RouteTable one = table_of(1, {{0}});
  const RouteTable two = table_of(2, {{0, 1}});
  const auto build = [](std::vector<RouteTable> routes, int experts, std::vector<int64_t> budgets) {
    return message_of([&] { static_cast<void>(build_plans(routes, experts, {}, budgets)); });
  };
  EXPECT_EQ(build({}, 2, {}), "plan: no rank's routing is given (at least one)");
  EXPECT_EQ(
      build({one, one}, 3, {}), "plan: num_experts = 3 is not a positive multiple of num_ranks = 2"
  );
  EXPECT_EQ(build({one, two}, 2, {}), "plan: topk = 2 on rank 1 (1 on rank 0)");
  EXPECT_EQ(build({one, one}, 2, {3}), "plan: 1 row budgets for 2 ranks");
}

}  // namespace
}  // namespace weft
