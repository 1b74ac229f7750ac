// SPDX-License-Identifier: Apache-2.0
// How the watches of ranks on GPUs agree on calls that are made again (PeerLoss::kRepeat) while
// their callers wait for their streams, without a GPU: calls and gates are made up.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "fault/watched.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;
using Calls = LossWatch::Calls;

constexpr int kRanks = 4;
// Another exchange, of which only the address is looked at.
const auto* const kElsewhere = reinterpret_cast<const LossWatch*>(&kRanks);

// A rank whose kernels have come to `state` when they are stopped.
class Repeating {
 public:
  Repeating(const Group& group, const Calls& state, std::chrono::milliseconds timeout = kTimeout)
      : state_(state),
        watch_(
            group,
            {.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = "peer"},
            timeout,
            {.stop = [] {},
             .calls = [this]() -> std::optional<Calls> { return state_; },
             .repeats =
                 {.try_lock = [this] { return caller_.try_lock(); },
                  .unlock = [this] { caller_.unlock(); },
                  .late = [this]() -> std::optional<LossWatch::Late> {
                    return is_late_ ? std::optional(late_) : std::nullopt;
                  },
                  .make =
                      [this](const LossWatch::Agreement& agreed) {
                        made_ = agreed;
                        is_over_ = true;
                      },
                  .release = [this] { is_over_ = true; }}}
        ) {}

  [[nodiscard]] LossWatch& watch() { return watch_; }
  void wait_in_vain(const LossWatch::Late& late) {
    late_ = late;
    is_late_ = true;
  }
  // The agreement in place of the caller; nothing: calls are void.
  [[nodiscard]] std::optional<LossWatch::Agreement> made() {
    const Deadline deadline(kSoon);
    while (!is_over_ && !deadline.has_passed()) {
      std::this_thread::sleep_for(1ms);
    }
    return made_;
  }
  [[nodiscard]] bool is_over() const { return is_over_; }
  // The caller's next call, which keeps the watch from answering.
  [[nodiscard]] std::optional<LossWatch::Agreement> settle() {
    const std::lock_guard lock(caller_);
    auto agreed = watch_.settle("plan", ErrorCode::kPeerFailed, state_);
    watch_.resume();
    return agreed;
  }

 private:
  Calls state_;
  LossWatch::Late late_ = {};
  std::optional<LossWatch::Agreement> made_;
  std::mutex caller_;
  std::atomic<bool> is_late_ = false;
  std::atomic<bool> is_over_ = false;
  LossWatch watch_;
};

// A rank has passed the gate of call `passed`.
Calls idle(uint64_t passed) {
  return {
      .last = passed, .first_void = passed + 1, .passed = passed, .whole = passed, .can_repeat = 1};
}
// More calls lie behind it, which another gate holds and which are whole or cut short.
Calls held(uint64_t passed, int32_t num_calls, bool is_whole) {
  const uint64_t last = passed + static_cast<uint64_t>(num_calls);
  return {
      .last = last,
      .first_void = is_whole ? last + 1 : passed + 1,
      .passed = passed,
      .whole = is_whole ? last : passed,
      .num_held = num_calls,
      .can_repeat = 1};
}

// A rank that leaves is lost to the others, which shall not see that.
void await_all(std::atomic<int>& num_done, int all) {
  const Deadline deadline(kSoon);
  ++num_done;
  while (num_done < all && !deadline.has_passed()) {
    std::this_thread::sleep_for(1ms);
  }
}

struct World {
  std::array<Calls, kRanks> ranks;  // rank 1 is killed
  bool is_repeated;
  uint64_t whole;
};

Calls unable(Calls calls) {
  calls.can_repeat = 0;
  return calls;
}

Calls replayed(Calls calls) {
  ++calls.last;
  return calls;
}

std::vector<World> worlds() {
  const Calls none = idle(0);
  return {
      {{idle(10), none, idle(10), idle(10)}, true, 10},
      {{held(10, 1, false), none, held(10, 1, true), held(10, 1, false)}, true, 10},
      {{held(10, 2, true), none, held(10, 2, true), held(10, 2, true)}, true, 12},
      {{idle(10), none, held(10, 1, false), held(10, 1, true)}, true, 10},
      // Rank 0 has yet to see that all have call 10, as ranks 2 and 3 have.
      {{held(9, 1, true), none, held(10, 1, false), idle(10)}, true, 10},
      {{held(8, 2, true), none, idle(10), idle(10)}, true, 10},
      // A graph, a hook, and a rank that others would have had to wait for.
      {{idle(10), none, replayed(idle(10)), idle(10)}, false, 0},
      {{held(10, 1, false), none, unable(held(10, 1, false)), idle(10)}, false, 0},
      {{held(9, 1, false), none, idle(10), idle(10)}, false, 0},
  };
}

TEST(CallRepeatsTest, WatchesAgreeWhatIsMadeAgain) {
  for (const World& world : worlds()) {
    const Shared<std::atomic<int>> num_done;
    const auto statuses = run_forked(kRanks, [&](const Group& group) {
      Repeating own(group, world.ranks[static_cast<size_t>(group.rank())]);
      group.barrier();
      if (group.rank() == 1) {
        static_cast<void>(::raise(SIGKILL));
      }
      const auto made = own.made();
      std::string problem = own.is_over() ? "" : "nobody has agreed; ";
      if (made.has_value() != world.is_repeated) {
        problem += world.is_repeated ? "nothing was made again; " : "calls were made again; ";
      } else if (made && made->whole != world.whole) {
        problem += fmt::format("whole {}; ", made->whole);
      }
      if (!world.is_repeated) {  // then the callers agree on what is void
        const Calls calls = world.ranks[static_cast<size_t>(group.rank())];
        const auto agreed = own.settle();
        problem += agreed && agreed->last >= calls.last && !agreed->is_repeated ? "" : "no calls; ";
      }
      if (own.watch().has_news() || own.watch().lost() != 0b10) {
        problem += fmt::format("lost {:b}; ", own.watch().lost());
      }
      await_all(*num_done, kRanks - 1);
      return verdict(group.rank(), problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, 0}));
  }
}

// A rank that lives is given up by those that have waited for it, and hears of it.
TEST(CallRepeatsTest, WatchesGiveUpARankThatDoesNotCome) {
  const Shared<std::atomic<int>> num_done;
  const auto statuses = run_forked(3, [&](const Group& group) {
    Repeating own(group, group.rank() == 1 ? idle(10) : held(10, 1, false));
    group.barrier();
    std::string problem;
    if (group.rank() == 1) {
      static_cast<void>(own.made());
      const auto thrown = thrown_by([&] { static_cast<void>(own.settle()); });
      problem = thrown && thrown->code == ErrorCode::kPeerFailed ? "" : "it does not hear of it";
    } else {
      own.wait_in_vain({ErrorCode::kTimeout, 1});
      problem = own.made() && own.watch().lost() == 0b10 ? "" : "not given up";
    }
    await_all(*num_done, 3);
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

// Calls cannot be made again. Rank 2 waits in another exchange while the others agree on what is
// void and then lose rank 3, too: it hears of both by its next call.
TEST(CallRepeatsTest, WatchesAnswerForACallerThatIsElsewhereAgain) {
  const Shared<std::atomic<int>> num_done;
  const Shared<std::atomic<int>> num_settled;
  const Shared<std::array<std::atomic<uint64_t>, kRanks>> last;
  const auto statuses = run_forked(kRanks, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    const Calls calls = unable(held(10, 1, false));
    Repeating own(group, calls);
    const std::unique_ptr<LossWatch::Wait> elsewhere =
        rank == 2 ? std::make_unique<LossWatch::Wait>(kElsewhere) : nullptr;
    group.barrier();
    if (rank == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    std::string problem = own.made() || !own.is_over() ? "not void; " : "";
    const auto settle = [&] {
      const auto agreed = own.settle();
      (*last)[rank] = agreed ? agreed->last : 0;
      problem += agreed && !agreed->is_repeated ? "" : "no calls; ";
    };
    if (rank != 2) {
      settle();
      ++*num_settled;
    }
    const Deadline deadline(kSoon);
    while (*num_settled < 2 && !deadline.has_passed()) {
      std::this_thread::sleep_for(1ms);
    }
    if (rank == 3) {
      static_cast<void>(::raise(SIGKILL));
    }
    while (rank == 0 && !own.watch().has_news() && !deadline.has_passed()) {
      std::this_thread::sleep_for(1ms);
    }
    while (own.watch().lost() != 0b1010 && !deadline.has_passed()) {
      settle();
    }
    await_all(*num_done, 2);
    problem += own.watch().lost() == 0b1010 ? "" : "not lost; ";
    problem += (*last)[0] == (*last)[2] && (*last)[0] >= calls.last ? "" : "other calls; ";
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, kKilled, 0, kKilled}));
}

// A wait was in vain although all live: the caller hears of that as without any of this.
TEST(CallRepeatsTest, WatchesLeaveAWaitForNobodyToTheCaller) {
  const auto statuses = run_forked(2, [](const Group& group) {
    Repeating own(group, held(10, 1, false), 300ms);
    group.barrier();
    std::string problem;
    if (group.rank() == 0) {
      own.wait_in_vain({ErrorCode::kTimeout, std::nullopt});
      problem = own.made() || !own.is_over() || !own.watch().has_answered() ? "not left" : "";
    }
    group.barrier();
    return verdict(group.rank(), problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace weft::test
