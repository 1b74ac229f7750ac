// SPDX-License-Identifier: Apache-2.0
#include "exchange/combine_sum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "exchange/row_sum.hpp"

namespace weft {
namespace {

// This rank reads the rows of `peer` itself.
bool is_read_here(const CpuCall& call, size_t peer) {
  return call.words[peer].own_rows.region.generation != 0;
}

ChunkTraffic traffic_of(const CpuCall& call, bool has_weights) {
  const PlanData& plan = call.plan;
  ChunkTraffic traffic;
  traffic.puts_per_chunk = has_weights ? 1 : 0;
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    const bool is_self = peer == static_cast<size_t>(plan.shape.rank);
    traffic.num_arrivals.push_back(is_self ? 0 : plan.sent[peer].size());
    traffic.puts_per_arrival.push_back(is_read_here(call, peer) ? 0 : 1);
  }
  return traffic;
}

}  // namespace

CombineSum::CombineSum(
    const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
)
    : rank_(rank),
      call_(call),
      plan_(call.plan),
      in_(in),
      out_(out),
      self_(static_cast<size_t>(call.plan.shape.rank)),
      row_bytes_(static_cast<size_t>(in.rows.row_bytes())),
      arrived_(
          rank.transport,
          rank.signals.combine(0, 0),
          rank.signals.max_chunks,
          traffic_of(call, in.weights.is_given()),
          rank.settled
      ),
      num_units_(num_chunks(call.plan.shape.num_tokens)) {
  for (size_t peer = 0; peer < plan_.sent.size(); ++peer) {
    const std::byte* rows = nullptr;
    if (peer == self_) {
      rows = in.rows.data;
    } else if (is_read_here(call, peer)) {
      const Target& at = call.words[peer].own_rows;
      rows = rank.transport.mapped(static_cast<int>(peer), at.region.slot) + at.offset;
    }
    rows_of_.push_back(rows);
  }
}

bool CombineSum::run_ready(Scratch& scratch) {
  int64_t unit = next_.load(std::memory_order_relaxed);
  if (unit >= num_units_ || !is_complete(unit) || !next_.compare_exchange_strong(unit, unit + 1)) {
    return false;
  }
  const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
  list_rows(range.first, scratch.rows);
  for (int64_t token = range.first; token < range.last; ++token) {
    if (token + 1 < range.last) {
      list_rows(token + 1, scratch.next_rows);
    } else {
      scratch.next_rows.clear();
    }
    std::byte* const out = out_.x.data + static_cast<size_t>(token) * row_bytes_;
    if (scratch.rows.rows.empty()) {
      std::memset(out, 0, row_bytes_);
    } else {
      sum_groups(out, scratch.rows, in_.rows.dtype, in_.rows.cols, scratch.next_rows.rows);
    }
    if (in_.weights.is_given()) {
      give_weights(token);
    }
    std::swap(scratch.rows, scratch.next_rows);
  }
  return true;
}

// What makes up a token, a group for each rank: its rows where they can be read here, else the
// partial sum that came.
void CombineSum::list_rows(int64_t token, RowGroups& groups) const {
  groups.clear();
  const auto t = static_cast<size_t>(token);
  const auto end = static_cast<size_t>(plan_.token_begin[t + 1]);
  for (auto a = static_cast<size_t>(plan_.token_begin[t]); a < end; ++a) {
    const auto peer = static_cast<size_t>(plan_.token_arrivals[a].rank);
    const auto index = static_cast<size_t>(plan_.token_arrivals[a].index);
    if (rows_of_[peer] == nullptr) {
      const std::byte* staged = call_.staging_data + call_.staging.rows[peer];
      groups.rows.push_back(staged + index * row_bytes_);
      if (in_.scale != CombineScale::kNone) {
        groups.weights.push_back(1.0F);  // its terms were multiplied before
      }
    } else {
      const Arrivals& pair = plan_.sent[peer];
      const std::span<const int32_t> slots = pair.slots(static_cast<int64_t>(index));
      for (size_t s = 0; s < slots.size(); ++s) {
        groups.rows.push_back(rows_of_[peer] + static_cast<size_t>(slots[s]) * row_bytes_);
        if (in_.scale != CombineScale::kNone) {
          const size_t route = static_cast<size_t>(pair.route_begin[index]) + s;
          groups.weights.push_back(scale_of(pair, token, route));
        }
      }
    }
    groups.group_ends.push_back(groups.rows.size());
  }
}

// The factor of one route's row. Only layouts of one row per route are scaled.
float CombineSum::scale_of(const Arrivals& pair, int64_t token, size_t route) const {
  if (in_.scale == CombineScale::kPlanWeights) {
    return pair.weight[route];
  }
  const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
  return weights[weight_index(plan_, token, pair.k[route])];
}

// Tells the ranks whose rows were read here that they may change them.
void CombineSum::release_rows() const {
  for (size_t peer = 0; peer < plan_.sent.size(); ++peer) {
    if (peer != self_ && rows_of_[peer] != nullptr) {
      const uint32_t signal = rank_.signals.rows_read(static_cast<uint32_t>(self_));
      rank_.transport.raise(static_cast<int>(peer), signal, 1);
    }
  }
}

void CombineSum::give_weights(int64_t token) const {
  const auto t = static_cast<size_t>(token);
  const auto cols = static_cast<size_t>(out_.weights.cols);
  const auto* row_weights = reinterpret_cast<const float*>(in_.weights.data);
  auto* const out = reinterpret_cast<float*>(out_.weights.data);
  std::fill_n(out + t * cols, cols, 0.0F);
  for (auto a = plan_.token_begin[t]; a < plan_.token_begin[t + 1]; ++a) {
    const TokenArrival& arrival = plan_.token_arrivals[static_cast<size_t>(a)];
    const auto peer = static_cast<size_t>(arrival.rank);
    const auto index = static_cast<size_t>(arrival.index);
    const Arrivals& pair = plan_.sent[peer];
    const auto* staged =
        reinterpret_cast<const float*>(call_.staging_data + call_.staging.weights[peer]);
    const auto end = static_cast<size_t>(pair.route_begin[index + 1]);
    for (auto j = static_cast<size_t>(pair.route_begin[index]); j < end; ++j) {
      out[weight_index(plan_, token, pair.k[j])] =
          peer == self_ ? row_weights[row_weight_index(plan_, pair, j)] : staged[j];
    }
  }
}

// Chunks of `peer` that hold the partial sums of the first tokens.
int64_t CombineSum::chunks_needed(size_t peer, int64_t num_tokens) const {
  const std::vector<int32_t>& tokens = plan_.sent[peer].token;
  const auto end = static_cast<int32_t>(num_tokens);
  return num_chunks(std::lower_bound(tokens.begin(), tokens.end(), end) - tokens.begin());
}

// Visits (peer, chunk) of all partial sums that a unit reads, until `visit` returns false.
template <class Visit>
void CombineSum::each_chunk(int64_t unit, const Visit& visit) const {
  const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
  for (size_t peer = 0; peer < arrived_.num_peers(); ++peer) {
    if (peer == self_) {
      continue;
    }
    // The last chunk of the unit before may hold this one's first.
    const int64_t begin = std::max<int64_t>(0, chunks_needed(peer, range.first) - 1);
    const int64_t end = chunks_needed(peer, range.last);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      if (!visit(peer, chunk)) {
        return;
      }
    }
  }
}

bool CombineSum::is_complete(int64_t unit) const {
  bool is_whole = true;
  each_chunk(unit, [&](size_t peer, int64_t chunk) {
    is_whole = arrived_.is_complete(peer, chunk);
    return is_whole;
  });
  return is_whole;
}

void CombineSum::wait() {
  const auto ready = [this] {
    const int64_t unit = next_.load(std::memory_order_relaxed);
    return unit >= num_units_ || is_complete(unit);
  };
  const auto missing = [this] {
    std::vector<Missing> late;
    const int64_t unit = next_.load(std::memory_order_relaxed);
    each_chunk(std::min(unit, num_units_), [&](size_t peer, int64_t chunk) {
      if (!arrived_.is_complete(peer, chunk)) {
        late.push_back(arrived_.missing(peer, chunk));
      }
      return true;
    });
    return late;
  };
  rank_.waiter.until(
      {.op = "combine", .call = call_.number, .what = "partial sums"},
      ready,
      missing,
      [this] { return rank_.workers.is_stopping(); }
  );
}

}  // namespace weft
