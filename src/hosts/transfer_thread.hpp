// SPDX-License-Identifier: Apache-2.0
// A thread that moves data for callers who go on meanwhile, one job after the other. Its jobs use
// no CUDA: a caller that waits for the GPU inside of CUDA keeps other threads out of it, and the
// GPU may wait for this one.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace weft {

class TransferThread {
 public:
  struct Job {
    std::function<void()> run;
    std::function<void()> give_up;  // after run() threw, and instead of it if an earlier one did
  };

  // Stays on `cores`, if there are any.
  explicit TransferThread(const std::vector<int>& cores = {});
  ~TransferThread();  // once all jobs have ended
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  void start(Job job);
  // Until all jobs have ended. Throws what the first threw that did, once; then jobs run again.
  void wait();
  [[nodiscard]] bool is_running() const;

 private:
  void serve();

  mutable std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Job> jobs_;  // the first is running
  std::exception_ptr failure_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace weft
