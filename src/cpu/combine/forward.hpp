// SPDX-License-Identifier: Apache-2.0
// The forwarding role of combine: adds, in rank order, what the ranks of this domain have for each
// token of another domain's rank, and sends it one row.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/chunk_work.hpp"
#include "cpu/combine/rows.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Returns whether this rank reads a member's rows: not if source weights, held there, scale them.
inline bool is_read_here(const CpuCall& call, const CombineInput& in, int member) {
  const Target& at = call.words[static_cast<size_t>(member)].own_rows;
  return member == call.plan.shape.rank ||
         (at.region.generation != 0 && in.scale != CombineScale::kSourceWeights);
}

inline ChunkTraffic forward_traffic(const CpuCall& call, const CombineInput& in) {
  ChunkTraffic traffic;
  if (!call.plan.between) {
    return traffic;
  }
  const std::span<const int> near = call.plan.between->domains->near();
  for (const ForwardedSource& forwarded : call.plan.between->forwarded) {
    for (size_t m = 0; m < near.size(); ++m) {
      const bool comes = !is_read_here(call, in, near[m]);
      traffic.sources.push_back(
          {.num_arrivals = comes ? forwarded.pairs[m].size() : 0, .peer = near[m]}
      );
    }
  }
  return traffic;
}

class CombineForward final : public ChunkWork<CombineForward> {
 public:
  CombineForward(const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        arrived_(call.rank, call.rank.signals.forwarded(0, 0), forward_traffic(call, in)),
        scratch_(static_cast<size_t>(call.rank.workers.num_workers())) {
    if (!plan_.between) {
      return;
    }
    for (const int member : plan_.between->domains->near()) {
      const bool is_read = is_read_here(call, in, member);
      rows_of_.push_back(is_read ? readable_rows(call, in, member) : nullptr);
    }
    std::vector<int64_t> num_crossings;
    for (const ForwardedSource& forwarded : plan_.between->forwarded) {
      num_crossings.push_back(forwarded.crossings.size());
    }
    set_queues(num_crossings);
  }

  // Is called after all workers have ended.
  void settle() { arrived_.settle(); }

  // Visits the partial sums of a chunk of inter-node tokens.
  template <class Visit>
  void each_needed(size_t forwarded, int64_t chunk, const Visit& visit) const {
    const Crossings& crossings = plan_.between->forwarded[forwarded].crossings;
    const ChunkRange range = chunk_range(crossings.size(), chunk);
    for (size_t m = 0; m < crossings.num_members; ++m) {
      const size_t pair = forwarded * crossings.num_members + m;
      if (arrived_.num_chunks_from(pair) == 0) {
        continue;
      }
      const std::vector<int32_t>& index = crossings.crossing[m];
      const auto begin = std::lower_bound(index.begin(), index.end(), range.first);
      const auto end = std::lower_bound(begin, index.end(), range.last);
      const int64_t last = num_chunks(end - index.begin());
      for (int64_t part = (begin - index.begin()) / kChunkArrivals; begin != end && part < last;
           ++part) {
        if (!visit(arrived_, pair, part)) {
          return;
        }
      }
    }
  }

  void run(size_t queue, int64_t chunk, int worker) {
    const ForwardedSource& forwarded = plan_.between->forwarded[queue];
    const ChunkRange range = chunk_range(forwarded.crossings.size(), chunk);
    const SumChunk sums = {
        .what = SumFor::kDomain,
        .to = static_cast<size_t>(forwarded.source),
        .first_row = range.first,
        .num_rows = range.last - range.first,
        .signal = call_.rank.signals.crossing(plan_.shape.rank, chunk)};
    SumScratch& scratch = scratch_[static_cast<size_t>(worker)];
    send_sums(call_, in_, sums, scratch, [&](int64_t i, RowGroups& groups) {
      list(forwarded, range.first + i, groups);
    });
  }

 private:
  // Lists a group for each rank of the domain that has the token: its rows where they can be read
  // here, else the partial sum that came. Source weights are of this rank's own pair.
  void list(const ForwardedSource& forwarded, int64_t crossing, RowGroups& groups) const {
    const auto source_weight = staged_weights(call_, static_cast<size_t>(forwarded.source));
    for (size_t m = 0; m < rows_of_.size(); ++m) {
      const int32_t arrival = forwarded.crossings.arrival_at(crossing, m);
      if (arrival < 0) {
        continue;
      }
      if (rows_of_[m] == nullptr) {
        const auto member = static_cast<size_t>(plan_.between->domains->near()[m]);
        const auto row = static_cast<uint64_t>(forwarded.first_row[m] + arrival);
        const std::byte* staged = call_.staging_data + call_.staging.rows[member];
        add_sum(in_, staged + row * static_cast<uint64_t>(returned_row_bytes(in_)), groups);
      } else {
        const Arrivals& pair = forwarded_pair(plan_, forwarded, m);
        add_arrival(in_, rows_of_[m], pair, arrival, source_weight, groups);
      }
    }
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  std::vector<const std::byte*> rows_of_;  // by member, where its rows can be read here; else null
  ChunkSignals arrived_;                   // by pair (source that this rank forwards for, member)
  std::vector<SumScratch> scratch_;        // by worker
};

}  // namespace weft
