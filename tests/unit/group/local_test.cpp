// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>

#include "group/control_plane.hpp"
#include "group_test.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft {
namespace {

using namespace std::chrono_literals;

TEST(LocalGroupTest, GathersBlocksOfAnySizeByRank) {
  for (const int num_ranks : {1, 2, 3, 8}) {
    run_threads(num_ranks, [&](Group& group) {
      for (int round = 0; round < 20; ++round) {
        expect_gathered(group, round);
      }
    });
  }
}

TEST(LocalGroupTest, KnowsItsPlace) {
  std::atomic<int> sum = 0;
  run_threads(4, [&](Group& group) {
    EXPECT_EQ(group.num_ranks(), 4);
    EXPECT_TRUE(group.topology().one_process);
    EXPECT_EQ(group.topology().domains, (std::vector<std::vector<int>>{{0, 1, 2, 3}}));
    sum += 1 << group.rank();
  });
  EXPECT_EQ(sum, 15);
}

TEST(LocalGroupTest, BarrierHoldsUntilAllHaveCome) {
  std::atomic<int> num_arrived = 0;
  run_threads(4, [&](Group& group) {
    ++num_arrived;
    group.barrier();
    EXPECT_EQ(num_arrived, 4);
  });
}

TEST(LocalGroupTest, RefusesAnEmptyGroup) {
  expect_error(ErrorCode::kInvalidArgument, "local: num_ranks = 0 is too small (at least 1)", [] {
    static_cast<void>(Group::local(0));
  });
}

TEST(LocalGroupTest, NamesTheRanksThatDidNotCall) {
  const auto controls = make_local_control(3, 100ms);
  expect_error(
      ErrorCode::kTimeout,
      "all_gather: ranks 1 and 2 did not call within 0.1 s [rank 0/3]",
      [&] { static_cast<void>(controls[0]({})); }
  );
}

TEST(LocalGroupTest, StaysBrokenAfterATimeout) {
  const auto controls = make_local_control(2, 10ms);
  for (const int rank : {0, 1}) {
    expect_error(ErrorCode::kTimeout, "all_gather: rank 1 did not call within 0.0 s", [&] {
      static_cast<void>(controls[static_cast<size_t>(rank)]({}));
    });
  }
}

TEST(LocalGroupTest, NamesTheRankThatLeft) {
  run_threads(3, [](Group& group) {
    if (group.rank() == 1) {
      return;
    }
    expect_error(ErrorCode::kPeerFailed, "all_gather: rank 1 left the group", [&] {
      group.barrier();
    });
  });
}

TEST(RunThreadsTest, RethrowsTheCauseRatherThanItsEcho) {
  const auto run = [] {
    run_threads(3, [](Group& group) {
      if (group.rank() == 2) {
        throw std::runtime_error("the cause");
      }
      group.barrier();
    });
  };
  EXPECT_THROW(
      try { run(); } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "the cause");
        throw;
      },
      std::runtime_error
  );
}

}  // namespace
}  // namespace weft
