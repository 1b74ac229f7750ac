// SPDX-License-Identifier: Apache-2.0
#include "cli/stop_request.hpp"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <new>

namespace weft::program {
namespace {

static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may touch nothing else");

constexpr std::array kSignals = {SIGINT, SIGTERM};

std::atomic<int>* shared_flag = nullptr;  // seen by all forked ranks
std::atomic<int64_t> asked_at = 0;        // seconds, of this process only; 0: not asked
static_assert(std::atomic<int64_t>::is_always_lock_free);
std::array<struct sigaction, kSignals.size()> old_actions;

int64_t now_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1;  // never 0
}

// One request often comes twice: to the process group, and passed on by the parent. Only a later
// one kills.
void on_signal(int signal) {
  constexpr int64_t kSameRequestSeconds = 2;
  int64_t first = 0;
  if (!asked_at.compare_exchange_strong(first, now_seconds()) &&
      now_seconds() - first >= kSameRequestSeconds) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  shared_flag->store(1);
}

}  // namespace

StopRequest::StopRequest() : memory_(SharedMemory::create(sizeof(std::atomic<int>))) {
  shared_flag = new (memory_.data()) std::atomic<int>(0);
  asked_at = 0;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &old_actions[i]);
    if (old_actions[i].sa_handler == SIG_IGN) {  // a job in the background: not for us
      sigaction(kSignals[i], &old_actions[i], nullptr);
    }
  }
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &old_actions[i], nullptr);
  }
  shared_flag = nullptr;
}

bool StopRequest::is_set() const {
  return shared_flag->load() != 0;
}

}  // namespace weft::program
