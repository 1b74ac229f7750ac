// SPDX-License-Identifier: Apache-2.0
#include "stop_request.hpp"

#include <array>
#include <atomic>
#include <csignal>
#include <sys/mman.h>

#include "core/check.hpp"

namespace weft::program {
namespace {

static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may touch nothing else");

constexpr std::array kSignals = {SIGINT, SIGTERM};

std::atomic<int>* shared_flag = nullptr;  // seen by all forked ranks
std::atomic<bool> was_asked = false;      // this process alone
std::array<struct sigaction, kSignals.size()> old_actions;

void on_signal(int signal) {
  if (was_asked.exchange(true)) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  shared_flag->store(1);
}

}  // namespace

StopRequest::StopRequest() {
  void* page = mmap(
      nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0
  );
  WEFT_CHECK(
      Context{}, page != MAP_FAILED, ErrorCode::kOutOfMemory, "{}", errno_text("mmap", errno)
  );
  shared_flag = new (page) std::atomic<int>(0);
  was_asked = false;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &old_actions[i]);
  }
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &old_actions[i], nullptr);
  }
  munmap(shared_flag, sizeof(std::atomic<int>));
  shared_flag = nullptr;
}

bool StopRequest::is_set() const {
  return shared_flag->load() != 0;
}

}  // namespace weft::program
