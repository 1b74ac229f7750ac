// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "group_test.hpp"

namespace weft {
namespace {

using namespace std::chrono_literals;
using Statuses = std::vector<int>;

constexpr ForkLimits kShort = {.notice = 100ms, .terminate = 100ms};

// Tells when the last process that inherited the writing end has ended.
class LifeLine {
 public:
  LifeLine() { EXPECT_EQ(pipe2(ends_.data(), O_CLOEXEC), 0); }
  ~LifeLine() {
    drop();
    close(ends_[0]);
  }
  void drop() {
    if (ends_[1] >= 0) {
      close(std::exchange(ends_[1], -1));
    }
  }
  void write_byte() const { EXPECT_EQ(write(ends_[1], "x", 1), 1); }
  // Waits for a byte, or for the end: 1 or 0; -1 if neither comes in time.
  [[nodiscard]] ssize_t read_byte(std::chrono::milliseconds timeout = 10s) const {
    pollfd entry = {ends_[0], POLLIN, 0};
    char byte = 0;
    const bool is_ready = poll(&entry, 1, static_cast<int>(timeout.count())) == 1;
    return is_ready ? read(ends_[0], &byte, 1) : -1;
  }

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

TEST(RunForkedTest, ReturnsEachRanksStatus) {
  const pid_t parent = getpid();
  const auto statuses = run_forked(4, [&](Group& group) {
    return getpid() != parent && group.num_ranks() == 4 ? 10 + group.rank() : 1;
  });
  EXPECT_EQ(statuses, (Statuses{10, 11, 12, 13}));
}

TEST(RunForkedTest, RanksGatherAndShareADomain) {
  const auto statuses = run_forked(3, [](Group& group) {
    for (int round = 0; round < 10; ++round) {
      expect_gathered(group, round);
    }
    EXPECT_FALSE(group.topology().one_process);
    EXPECT_EQ(group.topology().domains, (std::vector<std::vector<int>>{{0, 1, 2}}));
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(statuses, (Statuses{0, 0, 0}));
}

TEST(RunForkedTest, PrintsAnExceptionWithItsRank) {
  testing::internal::CaptureStderr();
  const auto statuses = run_forked(3, [](Group& group) {
    if (group.rank() == 1) {
      throw std::runtime_error("something broke");
    }
    if (group.rank() == 2) {
      throw 5;
    }
    return 0;
  });
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(statuses, (Statuses{0, 1, 1}));
  EXPECT_NE(text.find("rank 1: something broke\n"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2: an exception of unknown type\n"), std::string::npos) << text;
}

TEST(RunForkedTest, AStatusThatNoProcessCanHaveIsAFailure) {
  EXPECT_EQ(run_forked(1, [](Group&) { return 256; }), Statuses{1});
  EXPECT_EQ(run_forked(1, [](Group&) { return -1; }), Statuses{1});
}

TEST(RunForkedTest, TheOthersSeeARankThatWasKilledDuringAllGather) {
  for (const int victim : {0, 2}) {
    const auto statuses = run_forked(3, [&](Group& group) {
      group.barrier();
      if (group.rank() == victim) {
        kill(getpid(), SIGKILL);
      }
      expect_error(
          ErrorCode::kPeerFailed,
          fmt::format("all_gather: rank {} left the group", victim),
          [&] { group.barrier(); }
      );
      return testing::Test::HasFailure() ? 1 : 7;
    });
    Statuses expected = {7, 7, 7};
    expected[static_cast<size_t>(victim)] = 128 + SIGKILL;
    EXPECT_EQ(statuses, expected);
  }
}

TEST(RunForkedTest, EndsRanksThatOutliveAFailure) {
  const auto statuses = run_forked(
      3,
      [](Group& group) -> int {
        if (group.rank() == 0) {
          return 3;
        }
        if (group.rank() == 2) {
          signal(SIGTERM, SIG_IGN);
        }
        while (true) {
          pause();
        }
      },
      kShort
  );
  EXPECT_EQ(statuses, (Statuses{3, 128 + SIGTERM, 128 + SIGKILL}));
}

TEST(RunForkedTest, ARankThatEndsWellLeavesTheOthersRunning) {
  const auto statuses = run_forked(
      2,
      [](Group& group) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(500ms);  // longer than both limits together
        }
        return 0;
      },
      kShort
  );
  EXPECT_EQ(statuses, (Statuses{0, 0}));
}

TEST(RunForkedTest, RefusesAnEmptyGroup) {
  expect_error(ErrorCode::kInvalidArgument, "connect: num_ranks = 0 is too small", [] {
    static_cast<void>(run_forked(0, [](Group&) { return 0; }));
  });
}

// A process that runs two ranks which never end, as seen from outside.
class Program {
 public:
  // The ranks treat SIGTERM as `on_sigterm` says.
  explicit Program(sighandler_t on_sigterm = SIG_DFL) : on_sigterm_(on_sigterm) {
    pid_ = fork();
    if (pid_ == 0) {
      run();
    }
  }
  ~Program() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  void wait_until_ranks_run() {
    life_.drop();
    EXPECT_EQ(life_.read_byte(), 1);
    EXPECT_EQ(life_.read_byte(), 1);
  }
  void send(int signal) const { ASSERT_TRUE(pid_ > 0 && kill(pid_, signal) == 0); }
  // No process of it is left.
  [[nodiscard]] bool is_gone(std::chrono::milliseconds timeout = 10s) const {
    return life_.read_byte(timeout) == 0;
  }
  [[nodiscard]] int status() const {
    siginfo_t info = {};
    EXPECT_EQ(waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT), 0);
    return info.si_code == CLD_EXITED ? info.si_status : -1;
  }

 private:
  [[noreturn]] void run() noexcept {
    const auto statuses = run_forked(
        2,
        [this](Group&) -> int {
          signal(SIGTERM, on_sigterm_);
          life_.write_byte();
          while (true) {
            pause();
          }
        },
        kShort
    );
    life_.drop();
    _exit(statuses[0] == statuses[1] ? statuses[0] : 1);
  }

  LifeLine life_;
  sighandler_t on_sigterm_;
  pid_t pid_ = -1;
};

TEST(RunForkedTest, PassesSignalsOn) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Program program;
    program.wait_until_ranks_run();
    program.send(signal);
    EXPECT_TRUE(program.is_gone());
    EXPECT_EQ(program.status(), 128 + signal);
  }
}

TEST(RunForkedTest, TheSameSignalAgainKillsButNotAtOnce) {
  Program program(SIG_IGN);
  program.wait_until_ranks_run();
  const auto begin = Clock::now();
  program.send(SIGTERM);
  while (!program.is_gone(50ms) && Clock::now() - begin < 10s) {
    program.send(SIGTERM);
  }
  EXPECT_GE(Clock::now() - begin, 1s);
  EXPECT_EQ(program.status(), 128 + SIGKILL);
}

TEST(RunForkedTest, RanksEndWithTheirParent) {
  Program program;
  program.wait_until_ranks_run();
  program.send(SIGKILL);
  EXPECT_TRUE(program.is_gone());
}

TEST(RunForkedTest, LeavesTheParentsSignalsAsTheyWere) {
  sigset_t before = {};
  sigset_t after = {};
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  static_cast<void>(run_forked(1, [](Group&) { return 0; }));
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (const int signal : {SIGCHLD, SIGINT, SIGTERM}) {
    EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal));
  }
}

}  // namespace
}  // namespace weft
