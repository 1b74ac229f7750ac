// SPDX-License-Identifier: Apache-2.0
// Simulated time and those who spend it: events in order, and servers that take one job at a time.
// Time is a whole number of picoseconds, so that the same input gives the same times everywhere.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <vector>

#include "core/check.hpp"

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
};

// Events of one stream are added by ascending time, and only the first of each stream stands in
// line with the others: there are few streams and millions of events.
template <class Kind>
class EventQueue {
 public:
  explicit EventQueue(size_t num_streams) : streams_(num_streams) {}

  void add(Ticks at, Kind kind, uint32_t id) {
    line_.push({{at, next_order_++, kind, id}, kNoStream});
  }
  void add_to_stream(size_t stream, Ticks at, Kind kind, uint32_t id) {
    Stream& to = streams_[stream];
    const Event<Kind> event = {at, next_order_++, kind, id};
    WEFT_ASSERT(at >= to.last);
    to.last = at;
    if (to.is_in_line) {
      to.waiting.push_back(event);
    } else {
      to.is_in_line = true;
      line_.push({event, stream});
    }
  }
  [[nodiscard]] bool is_empty() const { return line_.empty(); }
  [[nodiscard]] Event<Kind> take() {
    const Entry first = line_.top();
    line_.pop();
    if (first.stream != kNoStream) {
      advance(first.stream);
    }
    return first.event;
  }

 private:
  static constexpr size_t kNoStream = SIZE_MAX;
  struct Stream {
    std::vector<Event<Kind>> waiting;
    size_t next = 0;
    Ticks last = 0;
    bool is_in_line = false;
  };
  struct Entry {
    Event<Kind> event;
    size_t stream;
  };
  struct Later {
    bool operator()(const Entry& a, const Entry& b) const {
      return a.event.at != b.event.at ? a.event.at > b.event.at : a.event.order > b.event.order;
    }
  };

  void advance(size_t number) {
    Stream& stream = streams_[number];
    if (stream.next < stream.waiting.size()) {
      line_.push({stream.waiting[stream.next++], number});
      return;
    }
    stream.is_in_line = false;
    stream.waiting.clear();
    stream.next = 0;
  }

  std::priority_queue<Entry, std::vector<Entry>, Later> line_;
  std::vector<Stream> streams_;
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
