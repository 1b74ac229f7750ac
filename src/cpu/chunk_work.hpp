// SPDX-License-Identifier: Apache-2.0
// Work of a call that waits for chunks from peers, and the signals that say which chunks have come.
// The roles in dispatch/ and combine/ that receive are classes of this kind; dispatch/call.cpp and
// combine/call.cpp run them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"

namespace weft {

// Arrivals that a peer sends here in one call.
struct ChunkSource {
  int64_t num_arrivals = 0;  // 0 for this rank itself
  uint64_t puts_per_arrival = 1;
  int peer = 0;  // whom an error names when a chunk does not come (Missing)
  int via = -1;
  std::vector<int> behind = {};  // ranks that `peer` may wait for itself
};

// Chunks that arrive here in one call.
struct ChunkTraffic {
  std::vector<ChunkSource> sources = {};
  uint64_t puts_per_chunk = 0;  // on top, e.g. one for all weights of a chunk

  [[nodiscard]] uint64_t num_puts(size_t peer, int64_t chunk) const {
    const ChunkRange range = chunk_range(sources[peer].num_arrivals, chunk);
    return puts_per_chunk +
           static_cast<uint64_t>(range.last - range.first) * sources[peer].puts_per_arrival;
  }
};

// Chunks whose arrivals have different numbers of puts, which are counted beforehand.
struct CountedTraffic {
  std::vector<ChunkSource> sources = {};
  std::vector<std::vector<uint64_t>> puts = {};  // by source and chunk

  [[nodiscard]] uint64_t num_puts(size_t peer, int64_t chunk) const {
    return puts[peer][static_cast<size_t>(chunk)];
  }
};

template <class Traffic>
class BasicChunkSignals {
 public:
  // `first_signal` is that of (source 0, chunk 0); sources follow each other at `max_chunks`.
  BasicChunkSignals(const CpuRank& rank, uint32_t first_signal, Traffic traffic)
      : transport_(rank.transport),
        first_signal_(first_signal),
        max_chunks_(rank.signals.max_chunks),
        traffic_(std::move(traffic)),
        settled_(rank.settled) {}

  [[nodiscard]] size_t num_peers() const { return traffic_.sources.size(); }
  [[nodiscard]] int64_t num_arrivals(size_t peer) const {
    return traffic_.sources[peer].num_arrivals;
  }
  [[nodiscard]] int64_t num_chunks_from(size_t peer) const {
    return num_chunks(num_arrivals(peer));
  }
  // Returns the signal raised at a receiver for a chunk of `rank`.
  [[nodiscard]] uint32_t signal(size_t rank, int64_t chunk) const {
    return first_signal_ + static_cast<uint32_t>(rank) * max_chunks_ + static_cast<uint32_t>(chunk);
  }
  [[nodiscard]] uint64_t wanted(size_t peer, int64_t chunk) const {
    return settled_[signal(peer, chunk)] + traffic_.num_puts(peer, chunk);
  }
  // Acquires what the chunk's puts wrote.
  [[nodiscard]] bool is_complete(size_t peer, int64_t chunk) const {
    return transport_.signal_value(signal(peer, chunk)) >= wanted(peer, chunk);
  }
  // Adds the ranks that the chunk waits for, each once.
  void add_missing(size_t peer, int64_t chunk, std::vector<Missing>& late) const {
    const ChunkSource& source = traffic_.sources[peer];
    const uint32_t number = signal(peer, chunk);
    const auto add = [&](int rank, int via) {
      const auto is_same = [&](const Missing& one) { return one.peer == rank && one.via == via; };
      if (std::ranges::none_of(late, is_same)) {
        late.push_back(
            {.peer = rank,
             .signal = number,
             .seen = transport_.signal_value(number),
             .wanted = wanted(peer, chunk),
             .via = via}
        );
      }
    };
    add(source.peer, source.via);
    for (const int rank : source.behind) {
      add(rank, source.peer);
    }
  }
  // Settles signals, on one thread, after all chunks are complete.
  void settle() {
    for (size_t peer = 0; peer < num_peers(); ++peer) {
      for (int64_t chunk = 0; chunk < num_chunks_from(peer); ++chunk) {
        settled_[signal(peer, chunk)] = wanted(peer, chunk);
      }
    }
  }

 private:
  const Transport& transport_;
  uint32_t first_signal_;
  uint32_t max_chunks_;
  Traffic traffic_;
  std::vector<uint64_t>& settled_;
};

using ChunkSignals = BasicChunkSignals<ChunkTraffic>;

// Some queues of chunks. Any worker claims a queue's next chunk once all it needs has come.
//
// `Work` derives from it and has run(queue, chunk, worker) and each_needed(queue, chunk, visit),
// which calls visit(signals, peer, chunk) for all that a chunk of a queue waits for, until that
// returns false.
template <class Work>
class ChunkWork {
 public:
  // Runs a chunk of each queue that has one ready. Any worker. Returns false if none had.
  bool run_ready(int worker) {
    bool has_run = false;
    for (size_t step = 0; step < next_.size(); ++step) {
      const size_t queue = (first_ + step) % next_.size();
      int64_t chunk = next_[queue].load(std::memory_order_relaxed);
      if (chunk < num_chunks_[queue] && is_complete(queue, chunk) &&
          next_[queue].compare_exchange_strong(chunk, chunk + 1)) {
        static_cast<Work&>(*this).run(queue, chunk, worker);
        has_run = true;
      }
    }
    return has_run;
  }

  // True if workers have claimed all chunks.
  [[nodiscard]] bool is_claimed() const {
    bool is_all = true;
    each_unclaimed([&](size_t /*queue*/, int64_t /*chunk*/) { is_all = false; });
    return is_all;
  }

  // True if run_ready() has a chunk to run.
  [[nodiscard]] bool has_ready() const {
    bool has_complete = false;
    each_unclaimed([&](size_t queue, int64_t chunk) {
      has_complete = has_complete || is_complete(queue, chunk);
    });
    return has_complete;
  }

  // Adds the ranks that the queues' next chunks wait for.
  void add_missing(std::vector<Missing>& late) const {
    each_unclaimed([&](size_t queue, int64_t chunk) {
      work().each_needed(queue, chunk, [&](const auto& from, size_t peer, int64_t part) {
        if (!from.is_complete(peer, part)) {
          from.add_missing(peer, part, late);
        }
        return true;
      });
    });
  }

 protected:
  ChunkWork() = default;

  // For the constructor: sets the arrivals or tokens of each queue, and the queue to try first.
  void set_queues(const std::vector<int64_t>& num_items, size_t first = 0) {
    first_ = first;
    for (const int64_t count : num_items) {
      num_chunks_.push_back(num_chunks(count));
    }
    next_ = std::vector<std::atomic<int64_t>>(num_items.size());
  }

 private:
  [[nodiscard]] const Work& work() const { return static_cast<const Work&>(*this); }

  [[nodiscard]] bool is_complete(size_t queue, int64_t chunk) const {
    bool is_whole = true;
    work().each_needed(queue, chunk, [&](const auto& from, size_t peer, int64_t part) {
      is_whole = from.is_complete(peer, part);
      return is_whole;
    });
    return is_whole;
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

  size_t first_ = 0;
  std::vector<int64_t> num_chunks_;         // by queue
  std::vector<std::atomic<int64_t>> next_;  // by queue, the first unclaimed chunk
};

// Has workers take turns: run_unit(unit, worker) for the next unit, then chunks that are ready of
// `forward` and `receive`. Returns when all are done; `reason` names what never came.
template <class RunUnit, class Forward, class Receive>
void take_turns(
    const CpuRank& rank,
    const WaitReason& reason,
    int64_t num_units,
    const RunUnit& run_unit,
    Forward& forward,
    Receive& receive
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
        break;
      }
      rank.waiter.until(reason, ready, missing, [&] { return rank.workers.is_stopping(); });
    }
  });
  forward.settle();
  receive.settle();
}

}  // namespace weft
