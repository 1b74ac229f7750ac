// SPDX-License-Identifier: Apache-2.0
// The threads of one rank. The caller's thread is worker 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace weft {

class WorkerPool {
 public:
  // All but worker 0 stay on `cores`, if there are any.
  explicit WorkerPool(int num_workers, const std::vector<int>& cores = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  [[nodiscard]] int num_workers() const { return static_cast<int>(threads_.size()) + 1; }
  // Runs `job(worker)` on every worker and returns when all have ended. The first exception is
  // rethrown; the others see is_stopping() and leave their waits.
  void run(const std::function<void(int)>& job);
  // Calls visit(i) once for each i below `count`, on any free worker; else as run(). Waking workers
  // takes tens of microseconds: unless `is_much`, the caller does it all.
  void for_each(size_t count, bool is_much, const std::function<void(size_t)>& visit);
  [[nodiscard]] bool is_stopping() const { return stopping_.load(std::memory_order_relaxed); }

 private:
  void end();
  void serve(int worker);
  void run_guarded(int worker);

  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const std::function<void(int)>* job_ = nullptr;
  uint64_t round_ = 0;
  int num_running_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace weft
