// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "core/clock.hpp"
#include "train/lanes/schedule.hpp"

namespace weft::overlap {
namespace {

// One run of one schedule.
class ThreadRun {
 public:
  explicit ThreadRun(const Schedule& schedule)
      : schedule_(schedule), has_ended_(schedule.steps().size(), 0) {}

  Trace run() {
    try {
      std::thread exchange([this] { drive(Lane::kExchange); });
      drive(Lane::kCompute);
      exchange.join();
    } catch (...) {  // no thread
      fail();
    }
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    sort_spans(trace_);
    return std::move(trace_);
  }

 private:
  // Never throws: a failure stops both lanes.
  void drive(Lane lane) noexcept {
    try {
      for (size_t idx = 0; idx < schedule_.steps().size(); ++idx) {
        if (schedule_.steps()[idx].lane != lane) {
          continue;
        }
        if (!wait_until_ready(schedule_.steps()[idx])) {
          return;
        }
        run_step(idx);
      }
    } catch (...) {
      fail();
    }
  }

  // False: the run has failed.
  bool wait_until_ready(const Step& step) {
    std::unique_lock lock(mutex_);
    const auto is_ready = [&] {
      return std::all_of(step.waits.begin(), step.waits.end(), [&](int wait) {
        return has_ended_[static_cast<size_t>(wait)] != 0;
      });
    };
    changed_.wait(lock, [&] { return failure_ || is_ready(); });
    return !failure_;
  }

  void run_step(size_t idx) {
    const Step& step = schedule_.steps()[idx];
    const int64_t begin = now_ns();
    if (step.work) {
      step.work({step.lane});
    }
    const int64_t end = now_ns();
    {
      const std::lock_guard lock(mutex_);
      has_ended_[idx] = 1;
      trace_.spans.push_back(
          {static_cast<int>(idx), step.name, step.lane, step.micro_batch, begin, end}
      );
    }
    changed_.notify_all();
  }

  // Called while an exception is handled; the first one is kept.
  void fail() noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) {
        failure_ = std::current_exception();
      }
    }
    changed_.notify_all();
  }

  [[nodiscard]] int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }

  const Schedule& schedule_;
  const Clock::time_point start_ = Clock::now();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<char> has_ended_;  // by step
  Trace trace_;
  std::exception_ptr failure_;
};

}  // namespace

Trace run_on_threads(const Schedule& schedule) {
  return ThreadRun(schedule).run();
}

}  // namespace weft::overlap
