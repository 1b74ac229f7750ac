// SPDX-License-Identifier: Apache-2.0
#include "exchange/combine_sum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "exchange/row_sum.hpp"

namespace weft {
namespace {

ChunkTraffic traffic_of(const PlanData& plan, bool has_weights) {
  ChunkTraffic traffic = {
      .num_arrivals = {}, .puts_per_arrival = 1, .puts_per_chunk = has_weights ? uint64_t{1} : 0};
  for (int peer = 0; peer < plan.shape.num_ranks; ++peer) {
    const bool is_self = peer == plan.shape.rank;
    traffic.num_arrivals.push_back(is_self ? 0 : plan.sent[static_cast<size_t>(peer)].size());
  }
  return traffic;
}

}  // namespace

CombineSum::CombineSum(
    const CpuRank& rank,
    const CpuCall& call,
    const CombineInput& in,
    const CombineOutput& out,
    const CombineReduce& own
)
    : rank_(rank),
      call_(call),
      plan_(call.plan),
      in_(in),
      out_(out),
      own_(own),
      self_(static_cast<size_t>(call.plan.shape.rank)),
      row_bytes_(static_cast<size_t>(in.rows.row_bytes())),
      arrived_(
          rank.transport,
          rank.signals.combine(0, 0),
          rank.signals.max_chunks,
          traffic_of(call.plan, in.weights.is_given()),
          rank.settled
      ),
      num_units_(num_chunks(call.plan.shape.num_tokens)) {}

bool CombineSum::run_ready(Scratch& scratch) {
  int64_t unit = next_.load(std::memory_order_relaxed);
  if (unit >= num_units_ || !is_complete(unit) || !next_.compare_exchange_strong(unit, unit + 1)) {
    return false;
  }
  scratch.own_row.resize(row_bytes_);
  const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
  for (int64_t token = range.first; token < range.last; ++token) {
    sum(token, scratch);
    if (in_.weights.is_given()) {
      give_weights(token);
    }
  }
  return true;
}

void CombineSum::sum(int64_t token, Scratch& scratch) const {
  const auto t = static_cast<size_t>(token);
  const auto first = static_cast<size_t>(plan_.token_begin[t]);
  const auto last = static_cast<size_t>(plan_.token_begin[t + 1]);
  std::byte* const out = out_.x.data + t * row_bytes_;
  if (first == last) {
    std::memset(out, 0, row_bytes_);
    return;
  }
  std::array<const std::byte*, kMaxTopk> partial;
  for (size_t a = first; a < last; ++a) {
    const auto peer = static_cast<size_t>(plan_.token_arrivals[a].rank);
    const auto index = static_cast<size_t>(plan_.token_arrivals[a].index);
    if (peer != self_) {
      partial[a - first] = call_.staging_data + call_.staging.rows[peer] + index * row_bytes_;
      continue;
    }
    // A lone partial sum is the token already.
    std::byte* const own = last - first == 1 ? out : scratch.own_row.data();
    own_.reduce(self_, static_cast<int64_t>(index), own, scratch.reduce);
    partial[a - first] = own;
  }
  if (partial[0] != out) {
    sum_rows(out, {partial.data(), last - first}, nullptr, in_.rows.dtype, in_.rows.cols);
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
