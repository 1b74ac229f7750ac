// SPDX-License-Identifier: Apache-2.0
// Keeps one queue moving while the rank computes: most providers move bytes only when asked. Busy
// while there is traffic, then asleep on the queue's descriptor, or in slices that grow where the
// provider has none.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "core/descriptor.hpp"
#include "transport/ofi/queue.hpp"

namespace weft::ofi {

class ProgressThread {
 public:
  // `spin`: how long to look around after the last event before sleeping.
  ProgressThread(Queue& queue, std::chrono::nanoseconds spin);
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // A thread of this rank begins or ends to sleep until something comes.
  void add_sleeper();
  void remove_sleeper() { num_sleepers_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  void run();
  void sleep(int num_slices);
  void ring();

  Queue& queue_;
  std::chrono::nanoseconds spin_;
  Descriptor event_;  // written to end a sleep
  std::atomic<uint32_t> num_sleepers_ = 0;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;
};

}  // namespace weft::ofi
