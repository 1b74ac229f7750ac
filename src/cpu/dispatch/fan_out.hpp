// SPDX-License-Identifier: Apache-2.0
// The receiving role of dispatch: copies each arrival to its other slots (from staging: to all) as
// soon as its chunk is complete, while it is still in cache.
#pragma once

#include <span>
#include <vector>

#include "cpu/chunk_work.hpp"
#include "cpu/dispatch/row_stream.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

inline bool is_forwarded_here(const PlanData& plan, int source) {
  return plan.between && plan.between->find_forwarded(source) != nullptr;
}

inline ChunkTraffic fan_out_traffic(const PlanData& plan, size_t num_streams, bool has_weights) {
  ChunkTraffic traffic = {.puts_per_chunk = has_weights ? uint64_t{1} : 0};
  for (int source = 0; source < plan.shape.num_ranks; ++source) {
    const bool is_forwarded = is_forwarded_here(plan, source);
    const bool has_any = source != plan.shape.rank && (!is_forwarded || has_weights);
    traffic.sources.push_back(
        {.num_arrivals = has_any ? plan.received[static_cast<size_t>(source)].size() : 0,
         .puts_per_arrival = is_forwarded ? 0 : num_streams,
         .peer = source,
         .via = plan.between ? plan.between->domains->between(source) : -1}
    );
  }
  return traffic;
}

class DispatchFanOut final : public ChunkWork<DispatchFanOut> {
 public:
  DispatchFanOut(
      const CpuCall& call, std::span<const RowStream> streams, const RowWeights& row_weights
  )
      : call_(call),
        plan_(call.plan),
        streams_(streams),
        row_weights_(row_weights),
        arrived_(
            call.rank,
            call.rank.signals.dispatch(0, 0),
            fan_out_traffic(call.plan, streams.size(), row_weights.is_given())
        ) {
    std::vector<int64_t> num_arrivals;
    for (int source = 0; source < plan_.shape.num_ranks; ++source) {
      is_forwarded_.push_back(is_forwarded_here(plan_, source));
      num_arrivals.push_back(arrived_.num_arrivals(static_cast<size_t>(source)));
    }
    set_queues(num_arrivals, static_cast<size_t>(plan_.shape.rank));
  }

  // Is called after all workers have ended.
  void settle() { arrived_.settle(); }

  template <class Visit>
  void each_needed(size_t source, int64_t chunk, const Visit& visit) const {
    visit(arrived_, source, chunk);
  }

  void run(size_t source, int64_t chunk, int /*worker*/) {
    const Arrivals& pair = plan_.received[source];
    const ChunkRange range = chunk_range(pair.size(), chunk);
    const auto streams = is_forwarded_[source] ? std::span<const RowStream>() : streams_;
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

 private:
  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const RowWeights& row_weights_;
  ChunkSignals arrived_;
  std::vector<bool> is_forwarded_;  // by source: rows come by DispatchForward, weights here
};

}  // namespace weft
