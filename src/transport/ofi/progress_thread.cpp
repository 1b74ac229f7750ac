// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/progress_thread.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <ctime>
#include <poll.h>
#include <sys/eventfd.h>
#include <utility>

#include "core/clock.hpp"
#include "core/host_map.hpp"

namespace weft::ofi {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// With a descriptor the time is a safety net only, since not every provider reports all its
// timers there.
constexpr nanoseconds kLongestWait = milliseconds(100);
constexpr nanoseconds kWaitInFlight = milliseconds(5);
// Without a descriptor: the first and the longest sleep, which bounds how late bytes are noticed.
constexpr nanoseconds kFirstSlice = microseconds(20);
constexpr nanoseconds kSliceInFlight = microseconds(200);
constexpr nanoseconds kLongestSlice = milliseconds(1);
// While others poll: the first and the longest sleep, which bounds how late this thread takes over
// from a rank that stops polling to compute. A rank that stops to sleep calls add_sleeper().
constexpr nanoseconds kFirstNap = microseconds(100);
constexpr nanoseconds kLongestNap = milliseconds(1);
constexpr int kLooksPerClock = 16;

}  // namespace

ProgressThread::ProgressThread(Queue& queue, nanoseconds spin, std::vector<int> cores)
    : queue_(queue),
      spin_(spin),
      cores_(std::move(cores)),
      event_(WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
      ),
      thread_([this] { run_guarded(); }) {}

ProgressThread::~ProgressThread() {
  is_stopping_ = true;
  ring();
  thread_.join();
}

void ProgressThread::ring() {
  static_cast<void>(::eventfd_write(event_.get(), 1));  // full: it is awake anyway
}

void ProgressThread::add_sleeper() {
  const bool is_first = num_sleepers_.fetch_add(1, std::memory_order_relaxed) == 0;
  if (is_first && (queue_.descriptor() < 0 || is_napping_.load(std::memory_order_relaxed))) {
    ring();  // it may be in a long slice; to miss that it begins a nap costs no more than the nap
  }
}

bool ProgressThread::is_helped() {
  const uint32_t polls = queue_.num_polls() - num_own_polls_;
  return std::exchange(seen_polls_, polls) != polls &&
         num_sleepers_.load(std::memory_order_relaxed) == 0;
}

// Breaks the queue off if run() throws: threads that wait for the queue must hear that it is no
// longer polled.
void ProgressThread::run_guarded() {
  try {
    run();
  } catch (...) {
    queue_.break_off("progress thread", ENOTRECOVERABLE);
  }
}

void ProgressThread::run() {
  stay_on(cores_);
  auto last_event = Clock::now();
  int num_slices = 0;
  int num_naps = 0;
  while (!is_stopping_) {
    if (is_helped()) {
      nap(num_naps++);
      continue;
    }
    num_naps = 0;
    bool has_event = false;
    for (int look = 0; look < kLooksPerClock && !has_event; ++look) {
      has_event = queue_.try_poll() > 0;
      ++num_own_polls_;
      std::this_thread::yield();
    }
    const auto now = Clock::now();
    if (has_event) {
      last_event = now;
      num_slices = 0;
    } else if (now - last_event >= spin_) {
      sleep(num_slices++);
    }
  }
}

void ProgressThread::nap(int num_naps) {
  is_napping_.store(true, std::memory_order_relaxed);
  wait(std::min(kLongestNap, kFirstNap * (1 << std::min(num_naps, 10))), -1);
  is_napping_.store(false, std::memory_order_relaxed);
}

void ProgressThread::sleep(int num_slices) {
  const bool is_flying = queue_.num_flying() > 0;
  const bool is_awaited = is_flying || num_sleepers_.load(std::memory_order_relaxed) > 0;
  nanoseconds time = is_flying ? kWaitInFlight : kLongestWait;
  if (queue_.descriptor() < 0) {
    const nanoseconds longest = is_awaited ? kSliceInFlight : kLongestSlice;
    time = std::min(longest, kFirstSlice * (1 << std::min(num_slices, 10)));
  } else if (!queue_.may_sleep()) {
    time = num_slices == 0 ? nanoseconds(0) : kFirstSlice;  // something has come meanwhile
  }
  wait(time, queue_.descriptor());
}

// Waits for `descriptor` (-1: none) or for ring().
void ProgressThread::wait(nanoseconds at_most, int descriptor) {
  std::array<pollfd, 2> wanted = {
      pollfd{.fd = event_.get(), .events = POLLIN, .revents = 0},
      pollfd{.fd = descriptor, .events = POLLIN, .revents = 0}};  // -1 is passed over
  const timespec timeout = {.tv_sec = 0, .tv_nsec = static_cast<long>(at_most.count())};
  ::ppoll(wanted.data(), wanted.size(), &timeout, nullptr);
  if (wanted[0].revents != 0) {
    eventfd_t count = 0;
    static_cast<void>(::eventfd_read(event_.get(), &count));
  }
}

}  // namespace weft::ofi
