// SPDX-License-Identifier: Apache-2.0
// Keeps one queue moving while the rank computes: most providers move bytes only when asked. Busy
// while there is traffic, then asleep on the queue's descriptor, or in slices that grow where the
// provider has none. While other threads of the rank poll the queue, this one only polls at times,
// since two that poll keep each other, and threads that share their cores, from working.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/descriptor.hpp"
#include "transport/ofi/fabric/queue.hpp"

namespace weft::ofi {

class ProgressThread {
 public:
  // `spin`: how long to poll after the last event before sleeping. The thread stays on `cores`, if
  // there are any.
  ProgressThread(Queue& queue, std::chrono::nanoseconds spin, std::vector<int> cores);
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // Notes that a thread of this rank begins or ends to sleep until something comes.
  void add_sleeper();
  void remove_sleeper() { num_sleepers_.fetch_sub(1, std::memory_order_relaxed); }

 private:
  void run_guarded();
  void run();
  // Returns whether other threads have polled since the last call, and none sleeps.
  [[nodiscard]] bool is_helped();
  void nap(int num_naps);
  void sleep(int num_slices);
  void wait(std::chrono::nanoseconds at_most, int descriptor);
  void ring();

  Queue& queue_;
  std::chrono::nanoseconds spin_;
  std::vector<int> cores_;
  Descriptor event_;  // written to end a sleep
  std::atomic<uint32_t> num_sleepers_ = 0;
  std::atomic<bool> is_napping_ = false;
  uint32_t num_own_polls_ = 0;
  uint32_t seen_polls_ = 0;  // of other threads
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;
};

}  // namespace weft::ofi
