// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs that use several exchanges, without a GPU: they may hear of a loss in different
// ones first. tests/model/answers.pml goes through all orders.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "fault/watched.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// Rank 1 is killed, and the others' watches have seen it.
struct TwoExchanges {
  Watched here;
  Watched there;

  TwoExchanges(const Group& group, std::string_view transport)
      : here(group, transport), there(group, transport) {
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    static_cast<void>(here.watch().await_news(kSoon));
    static_cast<void>(there.watch().await_news(kSoon));
  }
};

// A rank that waits in one exchange answers for its others.
TEST_P(LossWatchTest, RanksThatComeToDifferentExchangesFirstAgreeInBoth) {
  for (int i = 0; i < 4; ++i) {
    const auto statuses = run_forked(4, [](const Group& group) {
      TwoExchanges two(group, GetParam());
      auto& [here, there] = two;
      Watched& first = group.rank() == 0 ? here : there;
      Watched& second = group.rank() == 0 ? there : here;
      std::string problem = first.problem(first.settle(), {0, 2, 3}, 0b10);
      problem += second.problem(second.settle(), {0, 2, 3}, 0b10);
      return verdict(group.rank(), problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, 0})) << i;
  }
}

// Rank 2 waits elsewhere while the others lose rank 1 and then rank 3: it hears of both at once, or
// of one after the other.
TEST_P(LossWatchTest, AnswersAgainBeforeTheRankHasHeardOfTheFirstLoss) {
  const auto statuses = run_forked(4, [](const Group& group) {
    TwoExchanges two(group, GetParam());
    auto& [here, there] = two;
    const auto lose_both = [](Watched& watched, LossWatch::Calls own) {
      LossWatch::Agreement all;
      const LossWatch::Wait wait(&watched.watch());  // as in its calls
      while (watched.watch().lost() != 0b1010) {
        static_cast<void>(watched.watch().await_news(kSoon));
        const auto agreed = watched.watch().settle("plan", ErrorCode::kPeerFailed, own).value();
        watched.watch().resume();
        all = {
            agreed.last,
            all.void_calls + agreed.void_calls,
            all.calls_behind + agreed.calls_behind};
        own = {agreed.last + 1, agreed.last + 2};  // it goes on from there and makes no call
      }
      return all;
    };
    LossWatch::Agreement all;
    if (group.rank() == 2) {
      static_cast<void>(lose_both(there, {10, 11}));
      all = lose_both(here, {12, 10});
    } else {
      static_cast<void>(here.settle());  // of the calls 8 to 13
      if (group.rank() == 3) {
        static_cast<void>(::raise(SIGKILL));
      }
      all = lose_both(here, {16, 16});  // it has gone on from call 14, and its 16th is void
      static_cast<void>(lose_both(there, {10, 11}));
    }
    const bool is_good = all.last == 16 && all.void_calls == (group.rank() == 0 ? 2 : 5) &&
                         all.calls_behind == (group.rank() == 0 ? 0 : 1 + 2) &&
                         here.watch().report().alive == std::vector{0, 2};
    const std::string problem =
        fmt::format("last {}, void {}, behind {}", all.last, all.void_calls, all.calls_behind);
    return verdict(group.rank(), is_good ? "" : problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, kKilled}));
}

// Rank 0 makes a call of one exchange again before it has heard of the loss in the other, where
// rank 2 waits for it.
TEST_P(LossWatchTest, AnswersWhileTheRankWaitsInACall) {
  const Shared<std::atomic<int>> num_calls;
  const auto statuses = run_forked(3, [&](const Group& group) {
    TwoExchanges two(group, GetParam());
    auto& [here, there] = two;
    const auto call = [&here = here, &num_calls] {
      const LossWatch::Wait wait(&here.watch());
      ++*num_calls;
      while (*num_calls < 2) {
        std::this_thread::sleep_for(1ms);
      }
    };
    std::string problem;
    if (group.rank() == 0) {
      problem = here.problem(here.settle(), {0, 2}, 0b10);
      call();
      problem += there.problem(there.settle(), {0, 2}, 0b10);
    } else {
      problem = there.problem(there.settle(), {0, 2}, 0b10);
      problem += here.problem(here.settle(), {0, 2}, 0b10);
      call();
    }
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0}));
}

// A rank that lets go of an exchange waits for no rank in it.
TEST_P(LossWatchTest, EndsWhileItAnswers) {
  const auto statuses = run_forked(3, [](const Group& group) {
    TwoExchanges two(group, GetParam());
    auto& [here, there] = two;
    std::string problem;
    if (group.rank() == 0) {
      problem = here.problem(here.settle(), {0, 2}, 0b10);
      there.leave();
    } else {
      std::thread other([&there = there] {
        static_cast<void>(thrown_by([&] { static_cast<void>(there.settle()); }));
      });
      std::this_thread::sleep_for(50ms);
      problem = here.problem(here.settle(), {0, 2}, 0b10);
      other.join();
    }
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0}));
}

}  // namespace
}  // namespace weft::test
