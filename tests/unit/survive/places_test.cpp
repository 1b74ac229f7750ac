// SPDX-License-Identifier: Apache-2.0
// Promises of both kinds of roll to processes that want a place among the ranks, and to those that
// have one: the same cases for ranks that agree by shared memory and by messages.
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "support/errors.hpp"
#include "support/refuse.hpp"
#include "survive/message_roll.hpp"
#include "survive/shared_roll.hpp"
#include "survive/survival.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// Kinds of roll, by the transport of the exchange.
constexpr auto kKinds = {"shm", "ofi"};

// A rank that makes calls in which nothing is exchanged. Its end leaves.
class Caller {
 public:
  Caller(const Group& group, const char* kind, std::chrono::milliseconds timeout = 60s)
      : kind_(kind), survival_(group, context_of(group, kind), timeout) {}
  ~Caller() { survival_.leave(); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  void call() {
    survival_.begin_call();
    finish();
  }
  void readmit(int rank) {
    const std::vector<int> ranks = {rank};
    survival_.begin_call();
    const std::vector<int> missing = survival_.readmit(ranks);
    finish();
    survival_.check_back(ranks, missing);
  }
  void give_up(int rank) { survival_.give_up(std::vector<int>{rank}); }
  [[nodiscard]] const std::vector<int>& members() const { return survival_.members(); }
  [[nodiscard]] std::string invitation() const { return survival_.invitation(kind_); }

 private:
  void finish() {
    while (!survival_.finish_call("call")) {
    }
  }

  const char* kind_;
  Survival survival_;
};

std::unique_ptr<Roll> roll_of(const Group& group, const char* kind) {
  if (kind == std::string_view("shm")) {
    return std::make_unique<SharedRoll>(make_shm_memory(), group);
  }
  return std::make_unique<MessageRoll>(group, *invitation_of(group), 20s);
}

void await(const std::function<bool()>& condition) {
  for (int look = 0; look < 20'000 && !condition(); ++look) {
    std::this_thread::sleep_for(1ms);
  }
  WEFT_CHECK(Context{}, condition(), ErrorCode::kTimeout, "waited in vain");
}

// The exit status of a process that expects to be refused with these words.
int verdict(const std::optional<Thrown>& thrown, const std::string& words) {
  const std::string text = text_of(thrown);
  const bool is_right = text.find(words) != std::string::npos;
  if (!is_right) {
    fmt::print(stderr, "{} (expected {})\n", text, words);
  }
  return is_right ? 0 : 1;
}

const std::vector<int> kAll = {0, 1, 2};

// How the process in a place ends, and what happens there before the next one comes.
enum class End : uint8_t { kKilled, kLeft, kMasked };
enum class Before : uint8_t { kNone, kOneGivesUp, kOneDies };
struct Case {
  const char* name;
  End end = End::kKilled;
  Before before = Before::kNone;
};
constexpr Case kCases[] = {
    {.name = "Killed"},
    {.name = "Left", .end = End::kLeft},
    {.name = "Masked", .end = End::kMasked},
    {.name = "OneGaveUp", .before = Before::kOneGivesUp},
    {.name = "OneDied", .before = Before::kOneDies},
};

class PlacesTest : public testing::TestWithParam<const char*> {};
class LostPlacesTest : public testing::TestWithParam<std::tuple<const char*, Case>> {};

INSTANTIATE_TEST_SUITE_P(By, PlacesTest, testing::ValuesIn(kKinds), [](const auto& at) {
  return std::string(at.param);
});
INSTANTIATE_TEST_SUITE_P(
    By,
    LostPlacesTest,
    testing::Combine(testing::ValuesIn(kKinds), testing::ValuesIn(kCases)),
    [](const auto& at) {
      return fmt::format("{}{}", std::get<0>(at.param), std::get<1>(at.param).name);
    }
);

TEST_P(PlacesTest, ThePlaceOfALivingRankIsRefusedAndAllGoOn) {
  const char* const kind = GetParam();
  struct Board {
    Letter letter;
    std::atomic<bool> is_over = false;
  };
  const Shared<Board> board;
  const Spare stranger([&] {
    const Group group = Group::rejoin(1, board->letter.await());
    const auto thrown = thrown_by([&] { Caller(group, kind, 3s); });
    board->is_over = true;
    return verdict(thrown, "rejoin: rank 1 is not lost to the others");
  });
  const auto statuses = run_forked(3, [&](const Group& group) {
    Caller rank(group, kind);
    if (group.rank() == 0) {
      board->letter.send(rank.invitation());
    }
    bool are_all_here = true;
    while (!board->is_over) {
      rank.call();
      are_all_here = are_all_here && (rank.members() == kAll || board->is_over);
      std::this_thread::sleep_for(1ms);
    }
    return are_all_here ? 0 : 1;
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 0));
  EXPECT_EQ(stranger.status(), 0);
}

TEST_P(PlacesTest, OfTwoProcessesInOnePlaceOneIsRefused) {
  const char* const kind = GetParam();
  struct Board {
    Letter letter;
    std::atomic<int> num_ready = 0;
    std::atomic<int> num_in = 0;
    std::atomic<int> num_refused = 0;
  };
  const Shared<Board> board;
  const auto come = [&] {
    const Group group = Group::rejoin(1, board->letter.await());
    ++board->num_ready;
    await([&] { return board->num_ready == 2; });
    const auto thrown = thrown_by([&] {
      Caller rank(group, kind, 20s);
      ++board->num_in;
      rank.call();  // which the others end by readmit()
      rank.call();
    });
    board->num_refused += thrown ? 1 : 0;
    return thrown ? verdict(thrown, "rejoin: another process has taken the place of rank 1") : 0;
  };
  const Spare first(come);
  const Spare second(come);
  const auto statuses = run_forked(3, [&](const Group& group) {
    Caller rank(group, kind);
    rank.call();
    if (group.rank() == 1) {
      std::raise(SIGKILL);
    }
    rank.call();
    if (group.rank() == 0) {
      board->letter.send(rank.invitation());
    }
    for (int look = 0; look < 1000 && board->num_refused == 0; ++look) {
      std::this_thread::sleep_for(1ms);
    }
    rank.readmit(1);
    rank.call();
    await([&] { return board->num_refused == 1; });
    return rank.members() == kAll ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  EXPECT_EQ(first.status(), 0);
  EXPECT_EQ(second.status(), 0);
  EXPECT_EQ(board->num_in, 1);
  EXPECT_EQ(board->num_refused, 1);
}

TEST_P(LostPlacesTest, ANewProcessTakesThePlaceOfALostRank) {
  const auto& [kind, spec] = GetParam();
  struct Board {
    Letter letter;
    std::atomic<bool> is_next = false;  // the one before has ended
  };
  const Shared<Board> board;
  const auto come_before = [&, kind = kind, before = spec.before] {
    const Group group = Group::rejoin(1, board->letter.await());
    if (before == Before::kOneDies) {
      const auto roll = roll_of(group, kind);
      roll->be_next(roll->members());
      roll->ask(true);
      return std::raise(SIGKILL);
    }
    return verdict(thrown_by([&] { Caller(group, kind, 1s); }), "have not called readmit within");
  };
  const Spare next([&, kind = kind, before = spec.before] {
    if (before != Before::kNone) {
      const int wanted = before == Before::kOneDies ? 128 + SIGKILL : 0;
      WEFT_CHECK(
          Context{}, Spare(come_before).status() == wanted, ErrorCode::kInternal, "the one before"
      );
    }
    board->is_next = true;
    Caller rank(Group::rejoin(1, board->letter.await()), kind);
    rank.call();  // which the others end by readmit()
    rank.call();
    return rank.members() == kAll ? 0 : 1;
  });
  const auto statuses = run_forked(3, [&, kind = kind, end = spec.end](const Group& group) {
    Caller rank(group, kind);
    if (group.rank() == 1 && end == End::kMasked) {
      const auto thrown = thrown_by([&] {
        rank.call();  // it may be masked before this has returned
        rank.call();
      });
      return verdict(thrown, "this rank was given up by the others");
    }
    rank.call();
    if (group.rank() == 1 && end == End::kKilled) {
      std::raise(SIGKILL);
    }
    if (group.rank() == 1) {
      return 0;
    }
    if (group.rank() == 0 && end == End::kMasked) {
      rank.give_up(1);
    }
    rank.call();
    if (group.rank() == 0) {
      board->letter.send(rank.invitation());
    }
    await([&] { return board->is_next.load(); });
    rank.readmit(1);
    rank.call();
    return rank.members() == kAll ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, spec.end == End::kKilled ? 128 + SIGKILL : 0, 0}));
  EXPECT_EQ(next.status(), 0);
}

// No deadline decides: it is ten minutes away.
TEST_P(PlacesTest, LivingRanksStayAndDeadOnesAreSeenWithoutProcessDescriptors) {
  if (!can_refuse()) {
    GTEST_SKIP() << "this machine has no filters of system calls";
  }
  for (const int error : {ENOSYS, EPERM, EMFILE}) {
    const auto statuses = run_forked(3, [&, kind = GetParam()](const Group& group) {
      if (!refuse(SYS_pidfd_open, error)) {
        return 2;
      }
      Caller rank(group, kind, 600s);
      rank.call();
      const bool are_all_here = rank.members() == kAll;
      group.barrier();
      if (group.rank() == 1) {
        std::raise(SIGKILL);
      }
      rank.call();
      return are_all_here && rank.members() == std::vector<int>{0, 2} ? 0 : 1;
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0})) << error;
  }
}

TEST(SharedRollTest, MembersAreRightAfterManyChanges) {
  run_threads(3, [](const Group& group) {
    SharedRoll roll(make_loopback_memory(), group);
    if (group.rank() == 0) {
      constexpr uint64_t kNumChanges = (1 << 17) + 1;
      const std::vector<int> all = {0, 1, 2};
      const std::vector<int> rest = {0, 1};
      for (uint64_t change = 1; change <= kNumChanges; ++change) {
        roll.propose(roll.members(), 1, change % 2 == 0 ? all : rest);
        roll.follow(roll.members());
      }
      const Roll::Members now = roll.members();
      EXPECT_EQ(now.epoch, kNumChanges);
      EXPECT_EQ(now.ranks, rest);
      EXPECT_EQ(now.lives, (std::vector<uint64_t>{0, 0, kNumChanges / 2}));
      EXPECT_TRUE(roll.is_in(now));
    }
    group.barrier();
  });
}

TEST(RollStateTest, TheLastChangeThatCanBeCountedIsFollowedByARefusal) {
  constexpr size_t kLastSeat = 2 * kMaxRanks - 1;
  RollState state(0);
  state.epoch = RollState::kMaxEpoch - 1;
  state.committed = RollState::counted(~uint64_t{0});
  state.change(kLastSeat, {});
  const RollState read(state.bits());
  EXPECT_EQ(read.epoch, RollState::kMaxEpoch);
  EXPECT_EQ(read.proposer, kLastSeat);
  EXPECT_EQ(read.committed, state.committed);
  const auto thrown = thrown_by([&] { state.change(0, {}); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->code, ErrorCode::kUnsupported);
  EXPECT_EQ(
      thrown->text.substr(0, 60), "survive: the members have changed 67108863 times (at most 67"
  );
  EXPECT_EQ(read.bits(), state.bits());
}

}  // namespace
}  // namespace weft::test
