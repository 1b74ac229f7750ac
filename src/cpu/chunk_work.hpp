// SPDX-License-Identifier: Apache-2.0
// Work of a call that waits for chunks from peers. The roles in dispatch/ and combine/ that receive
// are classes of this kind; dispatch/call.cpp and combine/call.cpp run them.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"

namespace weft {

// Some queues of chunks. Any worker claims the next chunk of a queue once what it needs has come.
class ChunkWork {
 public:
  virtual ~ChunkWork() = default;
  // Runs one chunk of each queue that has one ready. Any worker. False: there was none.
  bool run_ready(int worker) {
    bool has_run = false;
    for (size_t step = 0; step < next_.size(); ++step) {
      const size_t queue = (first_ + step) % next_.size();
      int64_t chunk = next_[queue].load(std::memory_order_relaxed);
      if (chunk < num_chunks_[queue] && is_complete(queue, chunk) &&
          next_[queue].compare_exchange_strong(chunk, chunk + 1)) {
        run(queue, chunk, worker);
        has_run = true;
      }
    }
    return has_run;
  }

  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const {
    bool is_all = true;
    each_unclaimed([&](size_t /*queue*/, int64_t /*chunk*/) { is_all = false; });
    return is_all;
  }

  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const {
    bool has_complete = false;
    each_unclaimed([&](size_t queue, int64_t chunk) {
      has_complete = has_complete || is_complete(queue, chunk);
    });
    return has_complete;
  }

  // What the next chunk of each queue waits for.
  virtual void add_missing(std::vector<Missing>& late) const = 0;

 protected:
  ChunkWork() = default;

  // For the constructor: how many arrivals or tokens each queue has, and the one to look at first.
  void set_queues(const std::vector<int64_t>& num_items, size_t first = 0) {
    first_ = first;
    for (const int64_t count : num_items) {
      num_chunks_.push_back(num_chunks(count));
    }
    next_ = std::vector<std::atomic<int64_t>>(num_items.size());
  }

  // Visits (queue, chunk) of the next chunk of each queue that has one left.
  template <class Visit>
  void each_unclaimed(const Visit& visit) const {
    for (size_t queue = 0; queue < next_.size(); ++queue) {
      const int64_t chunk = next_[queue].load(std::memory_order_relaxed);
      if (chunk < num_chunks_[queue]) {
        visit(queue, chunk);
      }
    }
  }

  [[nodiscard]] virtual bool is_complete(size_t queue, int64_t chunk) const = 0;
  virtual void run(size_t queue, int64_t chunk, int worker) = 0;

 private:
  size_t first_ = 0;
  std::vector<int64_t> num_chunks_;         // by queue
  std::vector<std::atomic<int64_t>> next_;  // by queue, the first chunk that nobody has claimed
};

// Each worker takes turns: run_unit(unit, worker) for the next unit, then what is ready of both
// works. Returns when all of it is done; `reason` names what has not come if it never is.
template <class RunUnit>
void take_turns(
    const CpuRank& rank,
    const WaitReason& reason,
    int64_t num_units,
    const RunUnit& run_unit,
    ChunkWork& forward,
    ChunkWork& receive
) {
  const auto is_claimed = [&] { return forward.is_claimed() && receive.is_claimed(); };
  const auto ready = [&] { return forward.has_ready() || receive.has_ready() || is_claimed(); };
  const auto missing = [&] {
    std::vector<Missing> late;
    forward.add_missing(late);
    receive.add_missing(late);
    return late;
  };
  std::atomic<int64_t> next_unit = 0;
  rank.workers.run([&](int worker) {
    while (!rank.workers.is_stopping()) {
      const int64_t unit = next_unit.fetch_add(1, std::memory_order_relaxed);
      if (unit < num_units) {
        run_unit(unit, worker);
      }
      const bool has_forwarded = forward.run_ready(worker);
      if (receive.run_ready(worker) || has_forwarded || unit < num_units) {
        continue;
      }
      if (is_claimed()) {
        return;
      }
      rank.waiter.until(reason, ready, missing, [&] { return rank.workers.is_stopping(); });
    }
  });
}

}  // namespace weft
