// SPDX-License-Identifier: Apache-2.0
#include "group/process_watch.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <ostream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "support/refuse.hpp"

namespace weft {
namespace {

pid_t fork_sleeper() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // never left behind
    for (;;) {
      ::pause();
    }
  }
  return child;
}

// Killed, reaped or not.
pid_t fork_dead(bool is_reaped) {
  const pid_t child = fork_sleeper();
  ::kill(child, SIGKILL);
  siginfo_t info = {};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | (is_reaped ? 0 : WNOWAIT));
  return child;
}

bool dies_soon(const ProcessWatch& watch) {
  for (int look = 0; look < 5000 && watch.is_alive(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return !watch.is_alive();
}

// System calls that fail in the process that watches.
struct Lack {
  std::string name;
  std::vector<std::pair<long, int>> refused;  // system calls, and how
};

void PrintTo(const Lack& lack, std::ostream* out) {
  *out << lack.name;
}

const Lack kNoProc = {"NoProc", {{SYS_pidfd_open, ENOSYS}, {SYS_openat, EACCES}}};
const std::vector<Lack> kLacks = {
    {"Nothing", {}},
    {"NoSuchCall", {{SYS_pidfd_open, ENOSYS}}},
    {"Forbidden", {{SYS_pidfd_open, EPERM}}},
    {"NoDescriptorLeft", {{SYS_pidfd_open, EMFILE}}},
};

// Runs a test in a process that lacks this.
void run_without(const Lack& lack, const std::function<void()>& body) {
  if (!lack.refused.empty() && !test::can_refuse()) {
    GTEST_SKIP() << "this machine has no filters of system calls";
  }
  const int status = test::status_of([&] {
    for (const auto& [call, error] : lack.refused) {
      EXPECT_TRUE(test::refuse(call, error));
    }
    body();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(status, 0);
}

class ProcessWatchTest : public testing::TestWithParam<Lack> {};

}  // namespace

TEST_P(ProcessWatchTest, SeesThatAProcessWasKilled) {
  run_without(GetParam(), [] {
    const pid_t child = fork_sleeper();
    const ProcessWatch watch(child);
    EXPECT_TRUE(watch.is_alive());
    EXPECT_TRUE(watch.sees_end());
    ::kill(child, SIGKILL);
    EXPECT_TRUE(dies_soon(watch)) << "before it is reaped";
    ::waitpid(child, nullptr, 0);
    EXPECT_FALSE(watch.is_alive()) << "after it is reaped";
  });
}

TEST_P(ProcessWatchTest, KeepsItsProcessWhenMoved) {
  run_without(GetParam(), [] {
    const pid_t child = fork_sleeper();
    ProcessWatch first(child);
    ProcessWatch second(std::move(first));
    EXPECT_TRUE(second.is_alive());
    ::kill(child, SIGKILL);
    EXPECT_TRUE(dies_soon(second));
    ProcessWatch third;
    EXPECT_TRUE(third.is_alive()) << "a watch of nobody";
    third = std::move(second);
    EXPECT_FALSE(third.is_alive());
    ::waitpid(child, nullptr, 0);
  });
}

TEST_P(ProcessWatchTest, WatchesItself) {
  run_without(GetParam(), [] { EXPECT_TRUE(ProcessWatch(::getpid()).is_alive()); });
}

TEST_P(ProcessWatchTest, SeesThatAProcessHadEndedBefore) {
  run_without(GetParam(), [] {
    for (const bool is_reaped : {true, false}) {
      const pid_t child = fork_dead(is_reaped);
      EXPECT_FALSE(ProcessWatch(child).is_alive()) << "reaped: " << is_reaped;
      ::waitpid(child, nullptr, 0);
    }
  });
}

TEST_P(ProcessWatchTest, AProcessLivesOnWithoutItsFirstThread) {
  run_without(GetParam(), [] {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      std::thread(::pause).detach();
      ::syscall(SYS_exit, 0);  // of this thread
    }
    const auto state_now = [path = fmt::format("/proc/{}/stat", child)] {
      std::string pid;
      std::string name;
      char state = 0;
      std::ifstream(path) >> pid >> name >> state;
      return state;
    };
    for (int look = 0; look < 5000 && state_now() != 'Z'; ++look) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(state_now(), 'Z');
    const ProcessWatch watch(child);
    EXPECT_TRUE(watch.is_alive());
    ::kill(child, SIGKILL);
    EXPECT_TRUE(dies_soon(watch));
    ::waitpid(child, nullptr, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Without, ProcessWatchTest, testing::ValuesIn(kLacks), [](const auto& at) {
  return at.param.name;
});

// A zombie, which the pid alone does not tell from a process that runs.
TEST(BlindProcessWatchTest, WhatCannotBeKnownIsNoEnd) {
  run_without(kNoProc, [] {
    const pid_t child = fork_dead(/*is_reaped=*/false);
    const ProcessWatch watch(child);
    EXPECT_FALSE(watch.sees_end());
    EXPECT_TRUE(watch.is_alive());
    ::waitpid(child, nullptr, 0);
    EXPECT_FALSE(watch.is_alive()) << "no process has the pid";
  });
}

// It would be another process's, or nothing's.
TEST(BlindProcessWatchTest, ADescriptorThatOthersHaveClosedIsNoEnd) {
  const pid_t child = fork_sleeper();
  const int next = ::dup(STDERR_FILENO);
  ::close(next);
  const ProcessWatch watch(child);
  ::close(next);
  EXPECT_TRUE(watch.is_alive());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace weft
