// SPDX-License-Identifier: Apache-2.0
// The forwarding role of dispatch: rows that other domains sent to this rank go on to the ranks of
// its domain, chunk by chunk, as the source itself would send them there.
#pragma once

#include <span>
#include <vector>

#include "cpu/chunk_work.hpp"
#include "cpu/dispatch/row_stream.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

inline ChunkTraffic forward_traffic(const PlanData& plan, size_t num_streams) {
  ChunkTraffic traffic;
  for (int source = 0; source < plan.shape.num_ranks; ++source) {
    const ForwardedSource* forwarded =
        plan.between ? plan.between->find_forwarded(source) : nullptr;
    traffic.sources.push_back(
        {.num_arrivals = forwarded == nullptr ? 0 : forwarded->crossings.size(),
         .puts_per_arrival = num_streams,
         .peer = source}
    );
  }
  return traffic;
}

class DispatchForward final : public ChunkWork<DispatchForward> {
 public:
  DispatchForward(const CpuCall& call, std::span<const RowStream> streams)
      : call_(call),
        plan_(call.plan),
        streams_(streams),
        crossed_(
            call.rank, call.rank.signals.crossing(0, 0), forward_traffic(call.plan, streams.size())
        ) {
    std::vector<int64_t> num_arrivals;  // by pair
    const std::span<const ForwardedSource> sources =
        plan_.between ? plan_.between->forwarded : std::span<const ForwardedSource>();
    for (const ForwardedSource& forwarded : sources) {
      for (size_t m = 0; m < forwarded.pairs.size(); ++m) {
        pairs_.push_back({forwarded, m, forwarded_pair(plan_, forwarded, m)});
        num_arrivals.push_back(pairs_.back().arrivals.size());
      }
    }
    set_queues(num_arrivals);
  }

  // Is called after all workers have ended.
  void settle() { crossed_.settle(); }

  // Visits the chunks of inter-node tokens of a pair's chunk.
  template <class Visit>
  void each_needed(size_t p, int64_t chunk, const Visit& visit) const {
    const Pair& pair = pairs_[p];
    const ChunkRange range = chunk_range(pair.arrivals.size(), chunk);
    const std::vector<int32_t>& crossing = pair.forwarded.crossings.crossing[pair.member];
    const int64_t last = crossing[static_cast<size_t>(range.last) - 1] / kChunkArrivals;
    int64_t needed = crossing[static_cast<size_t>(range.first)] / kChunkArrivals;
    while (visit(crossed_, static_cast<size_t>(pair.forwarded.source), needed) && needed < last) {
      ++needed;
    }
  }

  void run(size_t p, int64_t chunk, int /*worker*/) {
    const Pair& pair = pairs_[p];
    const int to = plan_.between->domains->near()[pair.member];
    if (to == plan_.shape.rank) {
      keep(pair, chunk);
    } else {
      send(static_cast<size_t>(to), pair, chunk);
    }
  }

 private:
  struct Pair {
    const ForwardedSource& forwarded;
    size_t member;
    const Arrivals& arrivals;
  };

  // Sends a chunk to `to` as its source would.
  void send(size_t to, const Pair& pair, int64_t chunk) const {
    const PairChunk part = {
        .to = to,
        .pair = pair.arrivals,
        .range = chunk_range(pair.arrivals.size(), chunk),
        .signal = call_.rank.signals.dispatch(pair.forwarded.source, chunk),
        .first_row = pair.forwarded.first_row[pair.member]};
    PutList puts;
    for (const RowStream& stream : streams_) {
      add_rows(puts, call_, part, stream, [&](int64_t i) { return row(stream, pair, i); });
    }
    puts.send(call_.rank.transport, to, part.signal);
  }

  // Copies rows for this rank itself to all slots; DispatchFanOut has their weights.
  void keep(const Pair& pair, int64_t chunk) const {
    const ChunkRange range = chunk_range(pair.arrivals.size(), chunk);
    for (const RowStream& stream : streams_) {
      stream.store_rows(stream.out, pair.arrivals, range, [&](int64_t i) {
        return row(stream, pair, i);
      });
    }
    streaming_fence();
  }

  [[nodiscard]] const std::byte* row(const RowStream& stream, const Pair& pair, int64_t i) const {
    const int32_t index = pair.forwarded.crossings.crossing[pair.member][static_cast<size_t>(i)];
    const uint64_t first = (*stream.crossed)[static_cast<size_t>(pair.forwarded.source)];
    return call_.staging_data + first + static_cast<size_t>(index) * stream.row_bytes;
  }

  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  ChunkSignals crossed_;
  std::vector<Pair> pairs_;
};

}  // namespace weft
