// SPDX-License-Identifier: Apache-2.0
#include <atomic>
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
      : schedule_(schedule), spans_(schedule.size()), has_ended_(schedule.size()) {}

  Trace run() {
    {
      const std::jthread exchange([this] { drive(Lane::kExchange); });
      drive(Lane::kCompute);
    }
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    Trace trace = {std::move(spans_)};
    sort_spans(trace);
    return trace;
  }

 private:
  // Goes through all steps of the lane even when the run has failed, so that the other lane, which
  // may wait for any of them, comes to its end.
  void drive(Lane lane) noexcept {
    for (size_t idx = 0; idx < schedule_.size(); ++idx) {
      if (schedule_[idx].lane == lane) {
        run_step(idx);
        has_ended_[idx].test_and_set();
        has_ended_[idx].notify_all();
      }
    }
  }

  void run_step(size_t idx) {
    const Step& step = schedule_[idx];
    for (const int wait : step.waits) {
      has_ended_[static_cast<size_t>(wait)].wait(false);
    }
    if (has_failed_) {
      return;
    }
    try {
      const int64_t begin = now_ns();
      if (step.work) {
        step.work({step.lane});
      }
      spans_[idx] = {
          static_cast<int>(idx), step.name, step.lane, step.micro_batch, begin, now_ns()};
    } catch (...) {
      std::call_once(first_failure_, [this] { failure_ = std::current_exception(); });
      has_failed_ = true;
    }
  }

  [[nodiscard]] int64_t now_ns() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }

  const Schedule& schedule_;
  const Clock::time_point start_ = Clock::now();
  std::vector<Span> spans_;                  // by step
  std::vector<std::atomic_flag> has_ended_;  // by step
  std::atomic<bool> has_failed_ = false;
  std::once_flag first_failure_;
  std::exception_ptr failure_;
};

}  // namespace

Trace run_on_threads(const Schedule& schedule) {
  return ThreadRun(schedule).run();
}

}  // namespace weft::overlap
