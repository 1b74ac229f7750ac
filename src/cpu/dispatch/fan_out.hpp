// SPDX-License-Identifier: Apache-2.0
// The receiving role of dispatch: each arrival to its other slots (or all of them, out of staging)
// as soon as its chunk is complete, while it is still in cache.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "cpu/dispatch/row_stream.hpp"
#include "cpu/protocol/chunk_signals.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

inline bool is_carried_here(const PlanData& plan, int source) {
  return plan.between && plan.between->find_carried(source) != nullptr;
}

inline ChunkTraffic traffic_of(const PlanData& plan, size_t num_streams, bool has_weights) {
  ChunkTraffic traffic = {
      .num_arrivals = {},
      .puts_per_arrival = std::vector<uint64_t>(plan.received.size(), num_streams),
      .puts_per_chunk = has_weights ? uint64_t{1} : 0};
  for (int source = 0; source < plan.shape.num_ranks; ++source) {
    const auto s = static_cast<size_t>(source);
    const bool is_carried = is_carried_here(plan, source);
    const bool has_any = source != plan.shape.rank && (!is_carried || has_weights);
    traffic.num_arrivals.push_back(has_any ? plan.received[s].size() : 0);
    if (is_carried) {
      traffic.puts_per_arrival[s] = 0;
    }
    if (plan.between) {
      traffic.senders.push_back({source, plan.between->domains->between(source)});
    }
  }
  return traffic;
}

class DispatchFanOut {
 public:
  DispatchFanOut(
      const CpuRank& rank,
      const CpuCall& call,
      std::span<const RowStream> streams,
      const RowWeights& row_weights
  )
      : call_(call),
        plan_(call.plan),
        streams_(streams),
        row_weights_(row_weights),
        arrived_(
            rank.transport,
            rank.signals.dispatch(0, 0),
            rank.signals.max_chunks,
            traffic_of(call.plan, streams.size(), row_weights.is_given()),
            rank.settled
        ),
        next_(call.plan.received.size()) {
    for (int source = 0; source < plan_.shape.num_ranks; ++source) {
      is_carried_.push_back(is_carried_here(plan_, source));
    }
  }

  // Fans out one complete chunk of each source that has one. Any worker. False: there was none.
  bool run_ready() {
    const auto self = static_cast<size_t>(plan_.shape.rank);
    bool has_run = false;
    for (size_t step = 1; step < next_.size(); ++step) {
      has_run |= run_next((self + step) % next_.size());
    }
    return has_run;
  }

  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const {
    bool is_all = true;
    each_unclaimed([&](size_t /*source*/, int64_t /*chunk*/) { is_all = false; });
    return is_all;
  }

  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const {
    bool has_complete = false;
    each_unclaimed([&](size_t source, int64_t chunk) {
      has_complete = has_complete || arrived_.is_complete(source, chunk);
    });
    return has_complete;
  }

  // Chunks that nobody has claimed and that have not come.
  void add_missing(std::vector<Missing>& late) const {
    each_unclaimed([&](size_t source, int64_t chunk) {
      late.push_back(arrived_.missing(source, chunk));
    });
  }

  // After all workers have ended.
  void settle() { arrived_.settle(); }

 private:
  template <class Visit>
  void each_unclaimed(const Visit& visit) const {
    for (size_t source = 0; source < next_.size(); ++source) {
      const int64_t chunk = next_[source].load(std::memory_order_relaxed);
      if (chunk < arrived_.num_chunks_from(source)) {
        visit(source, chunk);
      }
    }
  }

  bool run_next(size_t source) {
    int64_t chunk = next_[source].load(std::memory_order_relaxed);
    if (chunk >= arrived_.num_chunks_from(source) || !arrived_.is_complete(source, chunk) ||
        !next_[source].compare_exchange_strong(chunk, chunk + 1)) {
      return false;
    }
    run(source, chunk);
    return true;
  }

  void run(size_t source, int64_t chunk) const {
    const Arrivals& pair = plan_.received[source];
    const ChunkRange range = chunk_range(pair.size(), chunk);
    const auto streams = is_carried_[source] ? std::span<const RowStream>() : streams_;
    const auto* staged_weights =
        reinterpret_cast<const float*>(call_.staging_data + call_.staging.weights[source]);
    for (int64_t i = range.first; i < range.last; ++i) {
      const std::span<const int32_t> slots = pair.slots(i);
      for (const RowStream& stream : streams) {
        if (stream.place == Place::kEverySlot) {
          continue;
        }
        const bool is_staged = stream.place == Place::kStaging;
        const std::byte* row = is_staged ? call_.staging_data + (*stream.staged)[source] +
                                               static_cast<size_t>(i) * stream.row_bytes
                                         : stream.row(slots[0]);
        for (const int32_t slot : slots.subspan(is_staged ? 0 : 1)) {
          stream.copy_row(stream.row(slot), row);
        }
      }
      if (row_weights_.is_given()) {
        row_weights_.put(pair, i, staged_weights + pair.route_begin[static_cast<size_t>(i)]);
      }
    }
    streaming_fence();
  }

  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const RowWeights& row_weights_;
  ChunkSignals arrived_;
  std::vector<bool> is_carried_;  // by source: its rows come by DispatchCarry, its weights here
  std::vector<std::atomic<int64_t>> next_;  // by source, first chunk nobody has claimed
};

}  // namespace weft
