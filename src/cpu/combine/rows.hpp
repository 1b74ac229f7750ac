// SPDX-License-Identifier: Apache-2.0
// Terms of a row of combine's output: rows that this rank reads where they are, and sums that came.
// forward.hpp, reduce.hpp and sum.hpp list their terms by these and add them up.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "call/payload.hpp"
#include "cpu/call.hpp"
#include "cpu/chunk_work.hpp"
#include "cpu/combine/coded_sum.hpp"
#include "cpu/combine/row_sum.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Adds groups up, rounded to the dtype or coded.
inline void add_up(
    const CombineInput& in,
    SumFor what,
    const RowGroups& groups,
    std::byte* out,
    std::span<const std::byte* const> next = {}
) {
  if (in.wire == Wire::kNone) {
    sum_groups(out, groups, in.rows.dtype, in.rows.cols, next);
  } else {
    sum_coded_groups(out, groups, in.wire, what, in.rows.cols);
  }
}

// Adds a sum that came, as a group of its own; its terms were multiplied before.
inline void add_sum(const CombineInput& in, const std::byte* row, RowGroups& groups) {
  groups.rows.push_back(row);
  if (in.scale != CombineScale::kNone) {
    groups.weights.push_back(1.0F);
  }
  groups.group_ends.push_back(groups.rows.size());
  if (in.wire != Wire::kNone) {
    groups.is_coded.push_back(true);
  }
}

// Adds an arrival's rows, of the output that begins at `rows`, as a group. Only layouts of one row
// per route are scaled; `source_weight(route)` is the factor with kSourceWeights.
template <class SourceWeight>
void add_arrival(
    const CombineInput& in,
    const std::byte* rows,
    const Arrivals& pair,
    int64_t arrival,
    const SourceWeight& source_weight,
    RowGroups& groups
) {
  const auto row_bytes = static_cast<size_t>(in.rows.row_bytes());
  auto route = static_cast<size_t>(pair.route_begin[static_cast<size_t>(arrival)]);
  for (const int32_t slot : pair.slots(arrival)) {
    groups.rows.push_back(rows + static_cast<size_t>(slot) * row_bytes);
    if (in.scale != CombineScale::kNone) {
      const bool is_of_plan = in.scale == CombineScale::kPlanWeights;
      groups.weights.push_back(is_of_plan ? pair.weight[route] : source_weight(route));
    }
    ++route;
  }
  groups.group_ends.push_back(groups.rows.size());
  if (in.wire != Wire::kNone) {
    groups.is_coded.push_back(false);
  }
}

// Returns factors, by route, that `source` sent for its pair with this rank.
[[nodiscard]] inline auto staged_weights(const CpuCall& call, size_t source) {
  const std::byte* staged = call.staging_data + call.staging.source_weights[source];
  return
      [weights = reinterpret_cast<const float*>(staged)](size_t route) { return weights[route]; };
}

// True if this rank reads the rows of `peer`, or is `peer`.
[[nodiscard]] inline bool is_readable(const CpuCall& call, int peer) {
  return peer == call.plan.shape.rank ||
         call.words[static_cast<size_t>(peer)].own_rows.region.generation != 0;
}

// Returns where the rows of `peer` are; null: this rank cannot read them.
[[nodiscard]] inline const std::byte* readable_rows(
    const CpuCall& call, const CombineInput& in, int peer
) {
  const Target& at = call.words[static_cast<size_t>(peer)].own_rows;
  if (peer == call.plan.shape.rank) {
    return in.rows.data;
  }
  return at.region.generation == 0 ? nullptr : reach(call, peer, at);
}

// A chunk of sums that this rank makes for a peer, of its own rows or of its domain's: stored in
// the peer's memory if possible, else made here and put.
struct SumChunk {
  SumFor what = SumFor::kRank;
  size_t to = 0;          // rank
  int64_t first_row = 0;  // of the chunk in the area that `to` named in its word
  int64_t num_rows = 0;
  uint32_t signal = 0;  // of `to`; grows by num_rows
};

// Memory of one worker, in cache lines of its own.
struct alignas(64) SumScratch {
  std::vector<std::byte> rows;  // a chunk that cannot be stored at the peer directly
  std::vector<float> weights;
  RowGroups now;
  RowGroups next;
};

// Sends a chunk; `list(i, groups)` adds the terms of its row i to `groups`, which are empty.
template <class List>
void send_sums(
    const CpuCall& call,
    const CombineInput& in,
    const SumChunk& chunk,
    SumScratch& scratch,
    const List& list
) {
  const int to = static_cast<int>(chunk.to);
  const auto row_bytes = static_cast<size_t>(returned_row_bytes(in));
  const Target& target = call.words[chunk.to].rows;
  std::byte* const peer_memory = call.rank.transport.mapped(to, target.region.slot);
  std::byte* rows = peer_memory;
  if (peer_memory != nullptr) {
    rows += target.offset + static_cast<uint64_t>(chunk.first_row) * row_bytes;
  } else {
    scratch.rows.resize(static_cast<size_t>(kChunkArrivals) * row_bytes);
    rows = scratch.rows.data();
  }
  std::array<Put, kChunkArrivals> puts;
  scratch.next.clear();
  list(0, scratch.next);
  for (int64_t i = 0; i < chunk.num_rows; ++i) {
    std::swap(scratch.now, scratch.next);
    scratch.next.clear();
    if (i + 1 < chunk.num_rows) {
      list(i + 1, scratch.next);
    }
    std::byte* const row = rows + static_cast<size_t>(i) * row_bytes;
    add_up(in, chunk.what, scratch.now, row, scratch.next.rows);
    puts[static_cast<size_t>(i)] =
        put_to(target, chunk.first_row + i, row, row_bytes, chunk.signal);
  }
  const auto count = static_cast<size_t>(chunk.num_rows);
  if (peer_memory != nullptr) {
    call.rank.transport.raise(to, chunk.signal, count);
  } else {
    call.rank.transport.put(to, {puts.data(), count});
  }
}

// Terms of each token that is added up by rank.
class CombineRows {
 public:
  using Traffic = ChunkTraffic;
  // Memory of one worker; `rows` point into the rest.
  struct Token {
    RowGroups rows;
    RowGroups near;                   // of this domain, where it is one of several
    std::vector<std::byte> near_sum;  // of those
  };

  CombineRows(const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        row_bytes_(static_cast<size_t>(returned_row_bytes(in))) {
    for (int peer = 0; peer < plan_.shape.num_ranks; ++peer) {
      is_read_.push_back(is_readable(call, peer));
      rows_of_.push_back(readable_rows(call, in, peer));
    }
  }

  // True if this rank reads the rows of `peer` and gets no partial sums, or is `peer`.
  [[nodiscard]] bool reads(size_t peer) const { return is_read_[peer]; }
  // Lists a group for each rank, or, of several domains, for each domain; none for a token without
  // routes. All that the token waits for must be here.
  void list(int64_t token, Token& out) const {
    out.rows.clear();
    if (plan_.between) {
      list_across(token, out);
    } else {
      list_arrivals(token, out.rows);
    }
  }

 private:
  // Lists a group for each domain, this one's ranks added up before. A token that goes to no other
  // domain needs only its ranks' groups, unless sums are coded.
  void list_across(int64_t token, Token& out) const {
    const DomainTraffic& between = *plan_.between;
    const auto parts = between.parts_of(static_cast<size_t>(token));
    for (const TokenPart& part : parts) {
      if (part.index != TokenPart::kHere) {
        const int forwarder = between.domains->forwarder_into(part.domain, plan_.shape.rank);
        const uint64_t first = call_.staging.crossing_rows[static_cast<size_t>(forwarder)];
        const size_t row = static_cast<size_t>(part.index) * row_bytes_;
        add_sum(in_, call_.staging_data + first + row, out.rows);
        continue;
      }
      if (parts.size() == 1 && in_.wire == Wire::kNone) {
        return list_arrivals(token, out.rows);
      }
      out.near.clear();
      list_arrivals(token, out.near);
      out.near_sum.resize(row_bytes_);
      add_up(in_, SumFor::kDomain, out.near, out.near_sum.data());
      add_sum(in_, out.near_sum.data(), out.rows);
    }
  }

  // Lists, for each rank of this domain, its rows where they can be read here, else the partial sum
  // that came.
  void list_arrivals(int64_t token, RowGroups& groups) const {
    const auto t = static_cast<size_t>(token);
    const auto* const weights = reinterpret_cast<const float*>(in_.source_weights.data);
    for (auto a = plan_.token_begin[t]; a < plan_.token_begin[t + 1]; ++a) {
      const TokenArrival& arrival = plan_.token_arrivals[static_cast<size_t>(a)];
      const auto peer = static_cast<size_t>(arrival.rank);
      if (!is_near(plan_, peer)) {
        continue;
      }
      if (!is_read_[peer]) {
        const std::byte* staged = call_.staging_data + call_.staging.rows[peer];
        add_sum(in_, staged + static_cast<size_t>(arrival.index) * row_bytes_, groups);
        continue;
      }
      const Arrivals& pair = plan_.sent[peer];
      const auto source_weight = [&](size_t route) {
        return weights[weight_index(plan_, token, pair.k[route])];
      };
      add_arrival(in_, rows_of_[peer], pair, arrival.index, source_weight, groups);
    }
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;                       // of a sum that came
  std::vector<bool> is_read_;              // by rank
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here
};

}  // namespace weft
