// SPDX-License-Identifier: Apache-2.0
#include "hosts/transfer_thread.hpp"

#include <utility>

#include "core/host_map.hpp"

namespace weft {

TransferThread::TransferThread(const std::vector<int>& cores)
    : thread_([this, cores] {
        stay_on(cores);
        serve();
      }) {}

TransferThread::~TransferThread() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  change_.notify_all();
  thread_.join();
}

void TransferThread::start(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  change_.notify_all();
}

void TransferThread::wait() {
  std::unique_lock lock(mutex_);
  change_.wait(lock, [&] { return jobs_.empty(); });
  if (const auto failure = std::exchange(failure_, nullptr)) {
    std::rethrow_exception(failure);
  }
}

bool TransferThread::is_running() const {
  const std::lock_guard lock(mutex_);
  return !jobs_.empty();
}

void TransferThread::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    change_.wait(lock, [&] { return !jobs_.empty() || is_ending_; });
    if (jobs_.empty()) {
      return;
    }
    const Job& job = jobs_.front();  // stays where it is while others follow
    std::exception_ptr failure = failure_;
    lock.unlock();
    try {
      if (!failure) {
        job.run();
      }
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) {
      job.give_up();
    }
    lock.lock();
    failure_ = failure;
    jobs_.pop_front();
    change_.notify_all();
  }
}

}  // namespace weft
