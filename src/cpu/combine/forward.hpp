// SPDX-License-Identifier: Apache-2.0
// The carrying role of combine: adds, in rank order, what the ranks of this domain have for each
// token of another domain's rank, and sends it one row.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/call.hpp"
#include "cpu/combine/row_sum.hpp"
#include "cpu/combine/send_sums.hpp"
#include "cpu/protocol/chunk_signals.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Weights that a source hands in are with the ranks whose rows they are for, so those multiply.
inline bool is_read_here(const CpuCall& call, const CombineInput& in, int member) {
  const Target& at = call.words[static_cast<size_t>(member)].own_rows;
  return member == call.plan.shape.rank ||
         (at.region.generation != 0 && in.scale != CombineScale::kSourceWeights);
}

inline std::vector<const std::byte*> readable_rows(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in
) {
  std::vector<const std::byte*> rows_of;
  if (!call.plan.between) {
    return rows_of;
  }
  for (const int member : call.plan.between->domains->near()) {
    const Target& at = call.words[static_cast<size_t>(member)].own_rows;
    if (member == call.plan.shape.rank) {
      rows_of.push_back(in.rows.data);
    } else if (is_read_here(call, in, member)) {
      rows_of.push_back(rank.transport.mapped(member, at.region.slot) + at.offset);
    } else {
      rows_of.push_back(nullptr);
    }
  }
  return rows_of;
}

inline ChunkTraffic traffic_of(const CpuCall& call, const CombineInput& in) {
  ChunkTraffic traffic;
  if (!call.plan.between) {
    return traffic;
  }
  const std::span<const int> near = call.plan.between->domains->near();
  for (const CarriedSource& carried : call.plan.between->carried) {
    for (size_t m = 0; m < near.size(); ++m) {
      const bool comes = !is_read_here(call, in, near[m]);
      traffic.num_arrivals.push_back(comes ? carried.pairs[m].size() : 0);
      traffic.puts_per_arrival.push_back(1);
      traffic.senders.push_back({near[m]});
    }
  }
  return traffic;
}

class CombineCarry {
 public:
  // Memory of one worker.
  struct Scratch {
    std::vector<std::byte> rows;  // a chunk that cannot be stored at the source directly
    RowGroups groups;
    RowGroups next;
  };

  CombineCarry(const CpuRank& rank, const CpuCall& call, const CombineInput& in)
      : rank_(rank),
        call_(call),
        plan_(call.plan),
        in_(in),
        row_bytes_(static_cast<size_t>(in.rows.row_bytes())),
        carried_(call.plan.between ? &call.plan.between->carried : nullptr),
        rows_of_(readable_rows(rank, call, in)),
        arrived_(
            rank.transport,
            rank.signals.carried(0, 0),
            rank.signals.max_chunks,
            traffic_of(call, in),
            rank.settled
        ),
        next_(carried_ == nullptr ? 0 : carried_->size()) {}

  // Sends one chunk of each source whose partial sums are complete. Any worker. False: none was.
  bool run_ready(Scratch& scratch) {
    bool has_run = false;
    for (size_t c = 0; c < next_.size(); ++c) {
      const CarriedSource& carried = (*carried_)[c];
      int64_t chunk = next_[c].load(std::memory_order_relaxed);
      if (chunk < num_chunks(carried.crossings.size()) && is_complete(c, chunk) &&
          next_[c].compare_exchange_strong(chunk, chunk + 1)) {
        run(carried, chunk, scratch);
        has_run = true;
      }
    }
    return has_run;
  }

  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const {
    bool is_all = true;
    each_unclaimed([&](size_t /*carried*/, int64_t /*chunk*/) { is_all = false; });
    return is_all;
  }

  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const {
    bool has_complete = false;
    each_unclaimed([&](size_t carried, int64_t chunk) {
      has_complete = has_complete || is_complete(carried, chunk);
    });
    return has_complete;
  }

  // Partial sums that some unclaimed chunk waits for.
  void add_missing(std::vector<Missing>& late) const {
    each_unclaimed([&](size_t carried, int64_t chunk) {
      each_chunk(carried, chunk, [&](size_t pair, int64_t part) {
        if (!arrived_.is_complete(pair, part)) {
          late.push_back(arrived_.missing(pair, part));
        }
        return true;
      });
    });
  }

  // After all workers have ended.
  void settle() { arrived_.settle(); }

 private:
  template <class Visit>
  void each_unclaimed(const Visit& visit) const {
    for (size_t c = 0; c < next_.size(); ++c) {
      const int64_t chunk = next_[c].load(std::memory_order_relaxed);
      if (chunk < num_chunks((*carried_)[c].crossings.size())) {
        visit(c, chunk);
      }
    }
  }

  // Visits (pair, chunk) of all partial sums that a chunk of crossing tokens needs, until `visit`
  // returns false.
  template <class Visit>
  void each_chunk(size_t carried, int64_t chunk, const Visit& visit) const {
    const Crossings& crossings = (*carried_)[carried].crossings;
    const ChunkRange range = chunk_range(crossings.size(), chunk);
    for (size_t m = 0; m < crossings.num_members; ++m) {
      const size_t pair = carried * crossings.num_members + m;
      if (arrived_.num_chunks_from(pair) == 0) {
        continue;
      }
      const std::vector<int32_t>& index = crossings.crossing[m];
      const auto begin = std::lower_bound(index.begin(), index.end(), range.first);
      const auto end = std::lower_bound(begin, index.end(), range.last);
      const int64_t last = num_chunks(end - index.begin());
      for (int64_t part = (begin - index.begin()) / kChunkArrivals; begin != end && part < last;
           ++part) {
        if (!visit(pair, part)) {
          return;
        }
      }
    }
  }

  [[nodiscard]] bool is_complete(size_t carried, int64_t chunk) const {
    bool is_whole = true;
    each_chunk(carried, chunk, [&](size_t pair, int64_t part) {
      is_whole = arrived_.is_complete(pair, part);
      return is_whole;
    });
    return is_whole;
  }

  void run(const CarriedSource& carried, int64_t chunk, Scratch& scratch) const {
    const ChunkRange range = chunk_range(carried.crossings.size(), chunk);
    const SumChunk sums = {
        .to = static_cast<size_t>(carried.source),
        .first_row = range.first,
        .num_rows = range.last - range.first,
        .row_bytes = row_bytes_,
        .signal = rank_.signals.crossing(
            static_cast<uint32_t>(plan_.shape.rank), static_cast<uint32_t>(chunk)
        )};
    list(carried, range.first, scratch.groups);
    send_sums(rank_, call_, sums, scratch.rows, [&](int64_t i, std::byte* row) {
      scratch.next.clear();
      if (i + 1 < sums.num_rows) {
        list(carried, range.first + i + 1, scratch.next);
      }
      sum_groups(row, scratch.groups, in_.rows.dtype, in_.rows.cols, scratch.next.rows);
      std::swap(scratch.groups, scratch.next);
    });
  }

  // A group for each rank of the domain that has the token: its rows where they can be read here,
  // else the partial sum that came.
  void list(const CarriedSource& carried, int64_t crossing, RowGroups& groups) const {
    groups.clear();
    const bool is_scaled = in_.scale != CombineScale::kNone;
    for (size_t m = 0; m < rows_of_.size(); ++m) {
      const int32_t arrival = carried.crossings.arrival_at(crossing, m);
      if (arrival < 0) {
        continue;
      }
      if (rows_of_[m] == nullptr) {
        const auto member = static_cast<size_t>(plan_.between->domains->near()[m]);
        const auto row = static_cast<size_t>(carried.first_row[m] + arrival);
        groups.rows.push_back(call_.staging_data + call_.staging.rows[member] + row * row_bytes_);
        if (is_scaled) {
          groups.weights.push_back(1.0F);  // its terms were multiplied before
        }
      } else {
        const Arrivals& pair = carried_pair(plan_, carried, m);
        const std::span<const int32_t> slots = pair.slots(arrival);
        const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(arrival)]);
        for (size_t s = 0; s < slots.size(); ++s) {
          groups.rows.push_back(rows_of_[m] + static_cast<size_t>(slots[s]) * row_bytes_);
          if (is_scaled) {
            groups.weights.push_back(scale_of(carried.source, pair, first + s));
          }
        }
      }
      groups.group_ends.push_back(groups.rows.size());
    }
  }

  // The factor of one route's row. Those that a source handed in are of this rank's own pair.
  [[nodiscard]] float scale_of(int source, const Arrivals& pair, size_t route) const {
    if (in_.scale == CombineScale::kPlanWeights) {
      return pair.weight[route];
    }
    const std::byte* staged =
        call_.staging_data + call_.staging.source_weights[static_cast<size_t>(source)];
    return reinterpret_cast<const float*>(staged)[route];
  }

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;
  std::vector<CarriedSource> const* carried_ = nullptr;  // null in a group of one domain
  std::vector<const std::byte*> rows_of_;   // by member, where its rows can be read here; else null
  ChunkSignals arrived_;                    // by pair (carried source, member)
  std::vector<std::atomic<int64_t>> next_;  // by carried source, first chunk nobody has claimed
};

}  // namespace weft
