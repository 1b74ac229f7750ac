// SPDX-License-Identifier: Apache-2.0
// How ranks on GPUs agree on who is left and on the calls that are to be made again, without a GPU:
// a flag stands for the kernels that are stopped.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "core/check.hpp"
#include "fault/watched.hpp"
#include "group/control_plane.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

INSTANTIATE_TEST_SUITE_P(
    By,
    LossWatchTest,
    testing::Values("peer", "peer+ofi"),
    [](const auto& parameter) {
      return std::string(parameter.param) == "peer" ? "Memory" : "Messages";
    }
);

TEST_P(LossWatchTest, AgreesOnCallsWhenARankIsKilled) {
  const auto statuses = run_forked(4, [](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    if (!own.watch().await_news(kSoon) || own.watch().has_left()) {
      return verdict(group.rank(), "heard of no death");
    }
    const auto agreed = own.settle();
    const std::string text = own.num_stops() == 1 ? "" : "the kernels were not stopped once";
    return verdict(group.rank(), text + own.problem(agreed, {0, 2, 3}, 0b10));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, 0}));
}

// One of those that hear of the first death dies instead of agreeing, at any moment.
TEST_P(LossWatchTest, AgreesWhenAnotherDiesMeanwhile) {
  for (int i = 0; i < 6; ++i) {
    const auto statuses = run_forked(4, [i](const Group& group) {
      Watched own(group, GetParam());
      group.barrier();
      if (group.rank() == 1) {
        static_cast<void>(::raise(SIGKILL));
      }
      static_cast<void>(own.watch().await_news(kSoon));
      if (group.rank() == 2) {
        std::thread([i] {
          std::this_thread::sleep_for(std::chrono::milliseconds(2 * i));
          static_cast<void>(::raise(SIGKILL));
        }).detach();
      }
      // A rank that has agreed with rank 2 before it died agrees again without it.
      auto agreed = own.settle();
      while (own.watch().lost() != 0b110) {
        static_cast<void>(own.watch().await_news(kSoon));
        agreed = own.settle();
      }
      return verdict(group.rank(), own.problem(agreed, {0, 3}, 0b110));
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, kKilled, 0})) << i;
  }
}

// Their last calls may end before it counts as lost.
TEST_P(LossWatchTest, GivesOthersTimeWhenARankLeaves) {
  const auto statuses = run_forked(3, [](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    if (group.rank() == 1) {
      own.leave();
      group.barrier();
      return 0;
    }
    while (!own.watch().has_left()) {
      std::this_thread::sleep_for(1ms);
    }
    const bool was_stopped = own.num_stops() > 0;
    static_cast<void>(own.watch().await_news(kSoon));
    const auto agreed = own.settle();
    group.barrier();
    const bool is_stopped = own.num_stops() == 1;
    const std::string text = was_stopped || !is_stopped ? "stopped too soon, or not at all; " : "";
    return verdict(group.rank(), text + own.problem(agreed, {0, 2}, 0b10));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST_P(LossWatchTest, AMaskedRankHearsOfIt) {
  const auto statuses = run_forked(3, [](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    if (group.rank() == 0) {
      own.watch().mask(std::array{1});
    }
    static_cast<void>(own.watch().await_news(kSoon));
    if (group.rank() != 1) {
      return verdict(group.rank(), own.problem(own.settle(), {0, 2}, 0b10));
    }
    const auto heard = thrown_by([&] { static_cast<void>(own.settle()); });
    const bool is_told =
        heard && heard->is_peer_error && heard->text.find("was given up by") != std::string::npos;
    return verdict(1, is_told ? "" : text_of(heard));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

// It lives, and its thread shows that, but it does not come to a call.
TEST_P(LossWatchTest, ARankThatMakesNoCallsIsGivenUp) {
  const auto statuses = run_forked(3, [](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    if (group.rank() != 1) {
      return verdict(group.rank(), own.problem(own.settle(ErrorCode::kTimeout, 1), {0, 2}, 0b10));
    }
    const bool has_news = own.watch().await_news(kSoon);
    const auto heard = thrown_by([&] { static_cast<void>(own.settle()); });
    const bool is_told =
        heard && heard->is_peer_error && heard->text.find("was given up by") != std::string::npos;
    return verdict(1, has_news && is_told ? "" : text_of(heard));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST_P(LossWatchTest, AStoppedRankIsGivenUpAfterADeadline) {
  const auto statuses = run_forked(3, [](const Group& group) {
    Watched own(group, GetParam(), 1s);
    const pid_t pid = ::getpid();
    const auto pids = group.all_gather(std::as_bytes(std::span(&pid, 1)));
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGSTOP));
      return 0;
    }
    const bool has_news = own.watch().await_news(100ms);
    const auto agreed = own.settle(ErrorCode::kTimeout);
    const auto stopped = block_value<pid_t>(pids[1], 1, Context{});
    static_cast<void>(::kill(stopped, SIGKILL));
    const std::string text = has_news ? "a rank that was stopped a moment ago is lost; " : "";
    return verdict(group.rank(), text + own.problem(agreed, {0, 2}, 0b10));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0}));
}

TEST_P(LossWatchTest, FindsNothingWhereNobodyIsLost) {
  const auto statuses = run_forked(2, [](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    const bool is_none = !own.settle();
    group.barrier();
    return is_none && own.num_stops() == 0 && own.watch().report().alive.size() == 2 ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

// Rank 1 is killed, and the others agree. -> what is wrong.
std::string lose_rank_1(Watched& own, const Group& group, const std::vector<int>& alive) {
  group.barrier();
  if (group.rank() == 1) {
    static_cast<void>(::raise(SIGKILL));
  }
  static_cast<void>(own.watch().await_news(kSoon));
  return own.problem(own.settle(), alive, 0b10);
}

// Ranks that a rank meets: all, those that it has heard, and those that are new.
struct Met {
  std::vector<int> ranks;
  std::vector<int> said;
  std::vector<int> newcomers;

  [[nodiscard]] LossWatch::Connect connect() {
    return [this](const Group& group, const Meeting& who) {
      ranks = who.ranks;
      newcomers = who.newcomers;
      said = gather_values(group, group.rank());
    };
  }
  [[nodiscard]] std::string problem(const std::vector<int>& all, const std::vector<int>& heard) {
    return ranks == all && said == heard
               ? ""
               : fmt::format("met {}, heard {}; ", fmt::join(ranks, ","), fmt::join(said, ","));
  }
};

// Rank 2 dies while those that are left reach each other anew.
TEST_P(LossWatchTest, ThoseThatAreLeftMeetOnceTheyHaveAgreed) {
  const Shared<std::atomic<int>> num_met;
  const auto statuses = run_forked(4, [&](const Group& group) {
    Met met;
    std::vector<std::vector<int>> meetings;
    const auto connect = [&](const Group& members, const Meeting& who) {
      met.connect()(members, who);
      meetings.push_back(who.ranks);
      ++*num_met;
      if (group.rank() == 2) {
        while (*num_met < 3) {  // or the others may hear of its end before they have met
          std::this_thread::sleep_for(1ms);
        }
        static_cast<void>(::raise(SIGKILL));
      }
      members.barrier();
    };
    Watched own(group, GetParam(), kTimeout, connect);
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    static_cast<void>(own.watch().await_news(kSoon));
    const auto agreed =
        own.watch().settle("plan", ErrorCode::kPeerFailed, {.last = 7, .first_void = 8});
    const int rank = group.rank();
    std::string problem = met.problem({0, 3}, {0, rank, rank, 3});
    problem +=
        meetings == std::vector<std::vector<int>>{{0, 2, 3}, {0, 3}} ? "" : "other meetings; ";
    problem +=
        agreed && agreed->last == 7 && agreed->void_calls == 0 ? "" : "agreed on other calls; ";
    const CallReport report = own.watch().report();
    problem +=
        report.lost == std::vector{1, 2} && report.alive == std::vector{0, 3} ? "" : "others lost";
    return verdict(rank, problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, kKilled, 0}));
}

// Rank 1 is killed, and its place taken; then the new process is killed, too.
TEST_P(LossWatchTest, ANewProcessMeetsThoseThatAreLeft) {
  const Shared<Letter> letter;
  const std::vector<int> all = {0, 1, 2};
  const Spare spare([&] {
    Watched own(Group::rejoin(1, letter->await()), GetParam());
    Met met;
    const bool had_news = own.watch().has_news();  // nobody stops kernels that are not there yet
    own.watch().meet(met.connect());
    own.watch().resume();
    const std::string problem = (had_news ? "" : "it is stopped before it is there; ") +
                                met.problem(all, all) +
                                (own.watch().report().alive == all ? "" : "some are not there");
    if (problem.empty()) {
      static_cast<void>(::raise(SIGKILL));
    }
    return verdict(1, problem);
  });
  const auto statuses = run_forked(3, [&](const Group& group) {
    Watched own(group, GetParam());
    std::string problem = lose_rank_1(own, group, {0, 2});
    if (group.rank() == 2) {
      letter->send(own.watch().invitation(GetParam()));
    }
    Met met;
    problem += own.watch().assemble("readmit", {}) ? "heard of another loss; " : "";
    const std::vector<int> missing = own.watch().readmit(std::array{1}, met.connect());
    own.watch().check_back(std::array{1}, missing);
    problem +=
        met.problem(all, all) + (met.newcomers == std::vector{1} ? "" : "another newcomer; ");
    problem += own.watch().report().alive == all && own.watch().lost() == 0 ? "" : "not all there";
    own.watch().resume();
    problem += own.watch().await_news(kSoon) ? "" : "heard of no second death; ";
    problem += own.problem(own.settle(), {0, 2}, 0b10);
    return verdict(group.rank(), problem + (own.num_stops() == 2 ? "" : "not stopped twice"));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0}));
  EXPECT_EQ(spare.status(), kKilled);
}

// One dies instead of coming to readmit: the others hear of it as in a call, and go on from there.
TEST_P(LossWatchTest, WhoWaitsForANewProcessHearsOfALoss) {
  const Shared<Letter> letter;
  const std::vector<int> all = {0, 1, 2};
  const Spare spare([&] {
    Watched own(Group::rejoin(1, letter->await()), GetParam());
    Met met;
    own.watch().meet(met.connect());
    return verdict(1, met.problem(all, {0, 1, 2, 1}));  // what rank 3 says this one says for it
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    Watched own(group, GetParam());
    std::string problem = lose_rank_1(own, group, {0, 2, 3});
    if (group.rank() == 3) {
      std::this_thread::sleep_for(30ms);
      static_cast<void>(::raise(SIGKILL));
    }
    const auto rank = static_cast<uint64_t>(group.rank());
    const LossWatch::Calls calls = {.last = 10 + rank, .first_void = 8 + rank};
    problem += own.problem(own.watch().assemble("readmit", calls), {0, 2}, 0b1010);
    problem += own.watch().assemble("readmit", calls) ? "heard of a third loss; " : "";
    if (group.rank() == 0) {
      letter->send(own.watch().invitation(GetParam()));
    }
    Met met;
    own.watch().check_back(std::array{1}, own.watch().readmit(std::array{1}, met.connect()));
    return verdict(group.rank(), problem + met.problem(all, {0, 1, 2, group.rank()}));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, kKilled}));
  EXPECT_EQ(spare.status(), 0);
}

// One comes to readmit and dies there, which another hears of in a call.
TEST_P(LossWatchTest, WhoHasComeToReadmitAndDiesIsLostToThoseInACall) {
  const auto statuses = run_forked(4, [](const Group& group) {
    Watched own(group, GetParam(), 3s);
    std::string problem = lose_rank_1(own, group, {0, 2, 3});
    if (group.rank() == 3) {
      std::thread([] {
        std::this_thread::sleep_for(100ms);
        static_cast<void>(::raise(SIGKILL));
      }).detach();
    }
    const auto rank = static_cast<uint64_t>(group.rank());
    const LossWatch::Calls calls = {.last = 10 + rank, .first_void = 8 + rank};
    if (group.rank() == 0) {
      problem += own.watch().await_news(kSoon) ? "" : "heard of no death; ";
      problem += own.problem(own.settle(), {0, 2}, 0b1010);
    } else {
      problem += own.problem(own.watch().assemble("readmit", calls), {0, 2}, 0b1010);
    }
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, kKilled}));
}

// Rank 0 waits in vain and meets the others, of whom rank 2 has died; rank 3, which was stopped
// meanwhile, waits on, and the new process comes. By messages it is turned away instead.
TEST(LossWatchByMemoryTest, WhoHasWaitedInVainMeetsWhoComesLater) {
  const Shared<Letter> letter;
  const std::vector<int> all = {0, 1, 3};
  const Spare spare([&] {
    Watched own(Group::rejoin(1, letter->await()), "peer");
    Met met;
    own.watch().meet(met.connect());
    return verdict(1, met.problem(all, {0, 1, 1, 3}));
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    Watched own(group, "peer", group.rank() == 0 ? 2s : 20s);
    const pid_t pid = ::getpid();
    const auto pids = group.all_gather(std::as_bytes(std::span(&pid, 1)));
    std::string problem = lose_rank_1(own, group, {0, 2, 3});
    problem += own.watch().assemble("readmit", {}) ? "heard of another loss; " : "";
    std::jthread others;  // what becomes of them
    if (group.rank() == 0) {
      others = std::jthread([&] {
        const auto dying = block_value<pid_t>(pids[2], 2, Context{});
        const auto stopped = block_value<pid_t>(pids[3], 3, Context{});
        std::this_thread::sleep_for(1500ms);
        ::kill(stopped, SIGSTOP);
        ::kill(dying, SIGKILL);
        std::this_thread::sleep_for(1000ms);
        ::kill(stopped, SIGCONT);
        std::this_thread::sleep_for(200ms);
        letter->send(own.watch().invitation("peer"));
      });
    }
    Met met;
    own.watch().check_back(std::array{1}, own.watch().readmit(std::array{1}, met.connect()));
    problem += met.problem(all, {0, 1, group.rank(), 3});
    problem += met.newcomers == std::vector{1} ? "" : "another newcomer; ";
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, kKilled, 0}));
  EXPECT_EQ(spare.status(), 0);
}

TEST_P(LossWatchTest, SaysWhoDoesNotComeBack) {
  const auto statuses = run_forked(3, [](const Group& group) {
    Watched own(group, GetParam(), 1s);
    std::string problem = lose_rank_1(own, group, {0, 2});
    Met met;
    const std::vector<int> missing = own.watch().readmit(std::array{1}, met.connect());
    const auto heard = thrown_by([&] { own.watch().check_back(std::array{1}, missing); });
    const bool is_told =
        text_of(heard).find("rank 1 did not come within 1.0 s") != std::string::npos;
    problem += is_told ? "" : text_of(heard);
    return verdict(group.rank(), problem + met.problem({0, 2}, {0, group.rank(), 2}));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0}));
}

// Threads of one process, for detectors of races.
TEST_P(LossWatchTest, ThreadsThatLeaveAreLost) {
  std::array<std::string, 3> problems;
  run_threads(3, [&](const Group& group) {
    Watched own(group, GetParam());
    group.barrier();
    if (group.rank() == 1) {
      own.leave();
    } else {
      static_cast<void>(own.watch().await_news(kSoon));
      const auto agreed = own.settle();
      problems[static_cast<size_t>(group.rank())] = own.problem(agreed, {0, 2}, 0b10);
    }
    group.barrier();
  });
  EXPECT_EQ(problems, (std::array<std::string, 3>{}));
}

}  // namespace
}  // namespace weft::test
