// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/worker_pool.hpp"

#include <fmt/format.h>

#include <system_error>

#include "core/check.hpp"
#include "core/float_state.hpp"
#include "core/host_map.hpp"

namespace weft {

WorkerPool::WorkerPool(int num_workers, const std::vector<int>& cores) {
  try {
    for (int worker = 1; worker < num_workers; ++worker) {
      threads_.emplace_back([this, worker, cores] {
        stay_on(cores);
        serve(worker);
      });
    }
  } catch (const std::system_error& error) {
    const size_t num_started = threads_.size();
    end();
    WEFT_RAISE(
        Context{},
        ErrorCode::kOutOfMemory,
        "workers: the system gives {} threads, {} are wanted ({})",
        num_started,
        num_workers - 1,
        error.what()
    );
  }
}

WorkerPool::~WorkerPool() {
  end();
}

void WorkerPool::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void WorkerPool::run(const std::function<void(int)>& job) {
  {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    failure_ = nullptr;
    stopping_.store(false, std::memory_order_relaxed);
    num_running_ = static_cast<int>(threads_.size());
    ++round_;
  }
  start_.notify_all();
  run_guarded(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return num_running_ == 0; });
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

void WorkerPool::for_each(size_t count, bool is_much, const std::function<void(size_t)>& visit) {
  if (!is_much || threads_.empty()) {
    for (size_t i = 0; i < count; ++i) {
      visit(i);
    }
    return;
  }
  std::atomic<size_t> next = 0;
  run([&](int /*worker*/) {
    while (!is_stopping()) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) {
        return;
      }
      visit(i);
    }
  });
}

void WorkerPool::run_guarded(int worker) {
  const StandardFloats floats;
  try {
    (*job_)(worker);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) {
      failure_ = std::current_exception();
    }
    stopping_.store(true, std::memory_order_relaxed);
  }
}

void WorkerPool::serve(int worker) {
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return ending_ || round_ != seen; });
      if (ending_) {
        return;
      }
      seen = round_;
    }
    run_guarded(worker);
    const std::lock_guard lock(mutex_);
    if (--num_running_ == 0) {
      done_.notify_one();
    }
  }
}

}  // namespace weft
