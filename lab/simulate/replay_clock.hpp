// SPDX-License-Identifier: Apache-2.0
// Simulated time and those who spend it: events in order, and servers that take one job at a time.
// Time is a whole number of picoseconds, so that the same input gives the same times everywhere.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

namespace weft::sim {

using Ticks = int64_t;  // picoseconds

inline constexpr double kTicksPerMicrosecond = 1e6;

[[nodiscard]] inline Ticks ticks_of_us(double us) {
  return std::llround(us * kTicksPerMicrosecond);
}
[[nodiscard]] inline double us_of_ticks(Ticks ticks) {
  return static_cast<double>(ticks) / kTicksPerMicrosecond;
}
// The time of so many bytes at a rate in GB/s (1e9).
[[nodiscard]] inline Ticks ticks_of_bytes(int64_t bytes, double gbps) {
  return std::llround(static_cast<double>(bytes) * 1e3 / gbps);
}

template <class Kind>
struct Event {
  Ticks at = 0;
  uint64_t order = 0;  // of being added: breaks ties
  Kind kind = {};
  uint32_t id = 0;

  // The last one comes first, as in a priority queue.
  bool operator<(const Event& other) const {
    return at != other.at ? at > other.at : order > other.order;
  }
};

template <class Kind>
class EventQueue {
 public:
  void add(Ticks at, Kind kind, uint32_t id) { line_.push({at, next_order_++, kind, id}); }
  [[nodiscard]] bool is_empty() const { return line_.empty(); }
  [[nodiscard]] Event<Kind> take() {
    const Event<Kind> first = line_.top();
    line_.pop();
    return first;
  }

 private:
  std::priority_queue<Event<Kind>> line_;
  uint64_t next_order_ = 0;
};

// One server of a kind for each rank. Jobs are handed in by ascending time of being ready, so that
// "first come, first served" is a number for each server.
class Servers {
 public:
  explicit Servers(int num_ranks)
      : free_at_(static_cast<size_t>(num_ranks)), busy_(static_cast<size_t>(num_ranks)) {}

  // Returns when the job is done: not before `not_before`, which lets a job that is still coming in
  // occupy its receiver no longer than its bytes do.
  Ticks serve(int rank, Ticks ready, Ticks duration, Ticks not_before = 0) {
    const auto r = static_cast<size_t>(rank);
    const Ticks end = std::max(std::max(ready, free_at_[r]) + duration, not_before);
    free_at_[r] = end;
    busy_[r] += duration;
    return end;
  }
  [[nodiscard]] Ticks most_busy() const {
    return busy_.empty() ? 0 : *std::max_element(busy_.begin(), busy_.end());
  }

 private:
  std::vector<Ticks> free_at_;
  std::vector<Ticks> busy_;
};

}  // namespace weft::sim
