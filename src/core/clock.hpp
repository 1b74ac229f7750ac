// SPDX-License-Identifier: Apache-2.0
// One clock for every wait, and the end of a wait.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>

namespace weft {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout)
      : timeout_(timeout), end_(Clock::now() + timeout) {}

  [[nodiscard]] bool has_passed() const { return Clock::now() >= end_; }
  [[nodiscard]] Clock::time_point end() const { return end_; }
  // Returns the whole wait, for messages.
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }
  // Returns what is left of the wait, rounded up, never negative: fit for poll().
  [[nodiscard]] std::chrono::milliseconds left() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(0));
  }

 private:
  std::chrono::milliseconds timeout_;
  Clock::time_point end_;
};

// Returns a text like "30.0 s".
[[nodiscard]] inline std::string seconds_text(std::chrono::duration<double> time) {
  return fmt::format("{:.1f} s", time.count());
}

}  // namespace weft
