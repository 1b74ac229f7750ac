// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/signal_block.hpp"

#include <climits>

#include <algorithm>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {

void SignalBlock::sleep(uint32_t seen, std::chrono::nanoseconds at_most) {
  constexpr int64_t kNanosPerSecond = 1'000'000'000;
  const int64_t nanos = std::max<int64_t>(at_most.count(), 0);
  const timespec timeout = {
      .tv_sec = static_cast<time_t>(nanos / kNanosPerSecond),
      .tv_nsec = static_cast<long>(nanos % kNanosPerSecond)};
  const Atomic32 waiters(header().waiters);
  const Atomic32 doorbell(header().doorbell);
  waiters.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell.load(std::memory_order_seq_cst) == seen) {
    ::syscall(SYS_futex, &header().doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  waiters.fetch_sub(1, std::memory_order_relaxed);
}

void SignalBlock::ring() {
  Atomic32(header().doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (Atomic32(header().waiters).load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &header().doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace weft
