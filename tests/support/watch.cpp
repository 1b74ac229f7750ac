// SPDX-License-Identifier: Apache-2.0
#include "support/watch.hpp"

#include <fmt/format.h>

#include <array>
#include <condition_variable>
#include <csignal>
#include <execinfo.h>
#include <filesystem>
#include <mutex>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr int kSignal = SIGUSR2;

void print_stack(int /*signal*/) {
  std::array<void*, 40> frames = {};
  const int depth = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
}

void print_stacks() {
  const long own = ::syscall(SYS_gettid);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const long thread = std::stol(entry.path().filename().string());
    if (thread != own) {
      fmt::print(stderr, "thread {}:\n", thread);
      static_cast<void>(::syscall(SYS_tgkill, ::getpid(), thread, kSignal));
      std::this_thread::sleep_for(50ms);  // one after the other
    }
  }
}

}  // namespace

Watch::Watch(int num_ranks, std::chrono::seconds patience)
    : doing_(static_cast<size_t>(num_ranks)) {
  std::array<void*, 1> frame = {};
  static_cast<void>(::backtrace(frame.data(), 1));  // loads what a handler must not load
  static_cast<void>(std::signal(kSignal, print_stack));
  looker_ =
      std::jthread([this, patience](const std::stop_token& is_over) { look(is_over, patience); });
}

void Watch::look(const std::stop_token& is_over, std::chrono::seconds patience) const {
  constexpr auto kEvery = 100ms;
  std::mutex mutex;
  std::condition_variable_any never;
  uint64_t seen = 0;
  auto idle = 0ms;
  while (!is_over.stop_requested()) {
    std::unique_lock lock(mutex);
    never.wait_for(lock, is_over, kEvery, [] { return false; });
    idle = seen == num_steps_ ? idle + kEvery : 0ms;
    seen = num_steps_;
    if (idle != patience) {
      continue;
    }
    for (size_t rank = 0; rank < doing_.size(); ++rank) {
      const char* step = doing_[rank];
      const char* told = step == nullptr ? "nothing yet" : step;
      fmt::print(stderr, "for {} s rank {}: {}\n", patience.count(), rank, told);
    }
    print_stacks();
  }
}

}  // namespace weft::test
