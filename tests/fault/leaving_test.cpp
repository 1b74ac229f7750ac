// SPDX-License-Identifier: Apache-2.0
// A rank that leaves while others still call: they hear of it at once, by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>

#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class LeavingTest : public testing::TestWithParam<const char*> {
 protected:
  LeavingTest() {
    setup_.num_ranks = 3;
    setup_.num_experts = 6;
    setup_.transport = GetParam();
    Case spec;
    spec.num_tokens = {20, 32, 7};
    data_ = make_case_data(setup_, spec);
  }

  // Rank 1 makes `num_calls` of plan, dispatch, combine and destroys its exchange. What the others
  // throw, by rank.
  std::vector<std::optional<Thrown>> after_rank_1_left(int num_calls) {
    std::vector<std::optional<Thrown>> all(3);
    run_threads(3, [&](const Group& group) {
      std::optional<Exchange> exchange(std::in_place, group, setup_.config());
      const auto rank = static_cast<size_t>(group.rank());
      all[rank] = thrown_by([&] { make_calls(*exchange, rank, rank == 1 ? num_calls : 4); });
      if (rank != 1) {
        const auto again = thrown_by([&] { make_calls(*exchange, rank, 1); });
        EXPECT_EQ(text_of(again), text_of(all[rank]));
      }
      if (rank == 1) {
        exchange.reset();
      }
      group.barrier();
    });
    return all;
  }

  void make_calls(Exchange& exchange, size_t rank, int num_calls) {
    const RankRouting& routing = data_.routing[rank];
    RankCall forward = data_.calls[0][rank];
    RankCall backward = data_.calls[1][rank];
    if (num_calls < 1) {
      return;
    }
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    if (num_calls >= 2) {
      exchange.dispatch(plan, forward.dispatch_input(), forward.dispatch_output());
    }
    if (num_calls >= 3) {
      exchange.combine(
          plan, backward.combine_input(CombineScale::kNone), backward.combine_output()
      );
    }
    if (num_calls >= 4) {
      static_cast<void>(exchange.plan(routing.routing(), routing.options));
    }
  }

  ExchangeSetup setup_;
  CaseData data_;
};

TEST_P(LeavingTest, IsAnErrorForThoseWhoCallOn) {
  const std::array<const char*, 4> operations = {"plan", "dispatch", "combine", "plan"};
  for (int num_calls = 0; num_calls < 4; ++num_calls) {
    const auto all = after_rank_1_left(num_calls);
    EXPECT_EQ(text_of(all[1]), "nothing");
    for (const size_t rank : {0U, 2U}) {
      const std::string text = text_of(all[rank]);
      ASSERT_NE(text, "nothing");
      EXPECT_TRUE(all[rank]->is_peer_error) << text;
      EXPECT_EQ(
          text,
          fmt::format(
              "{}: rank 1 left the exchange before its handshake arrived (call {}, signal {} at {} "
              "of {}) [rank {}/3, {}]",
              operations[static_cast<size_t>(num_calls)],
              num_calls + 1,
              num_calls % 2 == 0 ? 4 : 1,  // odd calls have the second set of signals
              num_calls / 2,
              num_calls / 2 + 1,
              rank,
              GetParam()
          )
      );
    }
  }
}

TEST_P(LeavingTest, DoesNotHarmThoseWhoAreDone) {
  run_threads(3, [&](const Group& group) {
    for (int round = 0; round < 10; ++round) {
      Exchange exchange(group, setup_.config());
      EXPECT_EQ(run_cases(exchange, {&data_, 1}), "");
    }  // whoever is first leaves while the others still work on the last call
  });
}

TEST_P(LeavingTest, LeavesTheGroupAbleToStartAfresh) {
  static_cast<void>(after_rank_1_left(1));
  EXPECT_EQ(run_cases_on_threads({&data_, 1}), "");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    LeavingTest,
    testing::Values("loopback", "shm"),
    [](const testing::TestParamInfo<const char*>& param) { return param.param; }
);

}  // namespace
}  // namespace weft::test
