// SPDX-License-Identifier: Apache-2.0
#include "group/process_watch.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "weft/error.hpp"

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

bool dies_soon(const ProcessWatch& watch) {
  for (int look = 0; look < 5000 && watch.is_alive(); ++look) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return !watch.is_alive();
}

}  // namespace

TEST(ProcessWatchTest, SeesThatAProcessWasKilled) {
  const pid_t child = fork_sleeper();
  const ProcessWatch watch(child);
  EXPECT_TRUE(watch.is_alive());
  ::kill(child, SIGKILL);
  EXPECT_TRUE(dies_soon(watch)) << "before it is reaped";
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(watch.is_alive()) << "after it is reaped";
}

TEST(ProcessWatchTest, KeepsItsProcessWhenMoved) {
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
}

TEST(ProcessWatchTest, WatchesItself) {
  EXPECT_TRUE(ProcessWatch(::getpid()).is_alive());
}

TEST(ProcessWatchTest, RefusesAProcessThatDoesNotExist) {
  const pid_t child = fork_sleeper();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  try {
    const ProcessWatch watch(child);
    ADD_FAILURE() << "a reaped process is watched";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotAvailable);
  }
}

}  // namespace weft
