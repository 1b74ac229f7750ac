// SPDX-License-Identifier: Apache-2.0
#include "exchange/combine_sum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "exchange/row_sum.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// This rank reads the rows of `peer` itself.
bool is_read_here(const CpuCall& call, size_t peer) {
  return call.words[peer].own_rows.region.generation != 0;
}

bool is_near(const PlanData& plan, size_t peer) {
  return !plan.between || plan.between->domains->is_near(static_cast<int>(peer));
}

ChunkTraffic traffic_of(const CpuCall& call, bool has_weights) {
  const PlanData& plan = call.plan;
  ChunkTraffic traffic;
  traffic.puts_per_chunk = has_weights ? 1 : 0;
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    const bool is_self = peer == static_cast<size_t>(plan.shape.rank);
    const bool has_any = !is_self && (is_near(plan, peer) || has_weights);
    traffic.num_arrivals.push_back(has_any ? plan.sent[peer].size() : 0);
    const bool has_rows = is_near(plan, peer) && !is_read_here(call, peer);
    traffic.puts_per_arrival.push_back(has_rows ? 1 : 0);
  }
  return traffic;
}

// By carrier.
ChunkTraffic crossing_traffic(const PlanData& plan) {
  ChunkTraffic traffic;
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    traffic.num_arrivals.push_back(crossings_to(plan, peer));
    traffic.puts_per_arrival.push_back(1);
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
      crossed_(
          rank.transport,
          rank.signals.crossing(0, 0),
          rank.signals.max_chunks,
          crossing_traffic(call.plan),
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
  list(range.first, scratch.now);
  for (int64_t token = range.first; token < range.last; ++token) {
    if (token + 1 < range.last) {
      list(token + 1, scratch.next);
    } else {
      scratch.next.rows.clear();
    }
    const RowGroups& rows = scratch.now.rows;
    std::byte* const out = out_.x.data + static_cast<size_t>(token) * row_bytes_;
    if (rows.rows.empty()) {
      std::memset(out, 0, row_bytes_);
    } else {
      sum_groups(out, rows, in_.rows.dtype, in_.rows.cols, scratch.next.rows.rows);
    }
    if (in_.weights.is_given()) {
      give_weights(token);
    }
    std::swap(scratch.now, scratch.next);
  }
  return true;
}

// What makes up a token: a group for each rank, or, of several domains, one for each of them.
void CombineSum::list(int64_t token, Token& out) const {
  out.rows.clear();
  if (plan_.between) {
    list_across(token, out);
  } else {
    list_arrivals(token, out.rows, [](size_t /*peer*/) { return true; });
  }
}

// A group for each domain, this one's ranks added up before. A token that goes to no other domain
// needs no more than their groups.
void CombineSum::list_across(int64_t token, Token& out) const {
  const DomainTraffic& between = *plan_.between;
  const auto t = static_cast<size_t>(token);
  const auto begin = static_cast<size_t>(between.token_begin[t]);
  const auto end = static_cast<size_t>(between.token_begin[t + 1]);
  for (size_t i = begin; i < end; ++i) {
    const TokenPart& part = between.token_parts[i];
    if (part.index != TokenPart::kHere) {
      const int carrier = between.domains->carrier_into(part.domain, plan_.shape.rank);
      const uint64_t first = call_.staging.crossing_rows[static_cast<size_t>(carrier)];
      const size_t row = static_cast<size_t>(part.index) * row_bytes_;
      add_row(call_.staging_data + first + row, out.rows);
      continue;
    }
    const auto is_here = [this](size_t peer) { return is_near(plan_, peer); };
    if (end - begin == 1) {
      return list_arrivals(token, out.rows, is_here);
    }
    out.near.clear();
    list_arrivals(token, out.near, is_here);
    out.near_sum.resize(row_bytes_);
    sum_groups(out.near_sum.data(), out.near, in_.rows.dtype, in_.rows.cols);
    add_row(out.near_sum.data(), out.rows);
  }
}

// A row that is a group of its own; its terms were multiplied before.
void CombineSum::add_row(const std::byte* row, RowGroups& groups) const {
  groups.rows.push_back(row);
  if (in_.scale != CombineScale::kNone) {
    groups.weights.push_back(1.0F);
  }
  groups.group_ends.push_back(groups.rows.size());
}

// Of each rank its rows where they can be read here, else the partial sum that came.
template <class Filter>
void CombineSum::list_arrivals(int64_t token, RowGroups& groups, const Filter& is_wanted) const {
  const auto t = static_cast<size_t>(token);
  const auto end = static_cast<size_t>(plan_.token_begin[t + 1]);
  for (auto a = static_cast<size_t>(plan_.token_begin[t]); a < end; ++a) {
    const auto peer = static_cast<size_t>(plan_.token_arrivals[a].rank);
    const auto index = static_cast<size_t>(plan_.token_arrivals[a].index);
    if (!is_wanted(peer)) {
      continue;
    }
    if (rows_of_[peer] == nullptr) {
      const std::byte* staged = call_.staging_data + call_.staging.rows[peer];
      add_row(staged + index * row_bytes_, groups);
      continue;
    }
    const Arrivals& pair = plan_.sent[peer];
    const std::span<const int32_t> slots = pair.slots(static_cast<int64_t>(index));
    for (size_t s = 0; s < slots.size(); ++s) {
      groups.rows.push_back(rows_of_[peer] + static_cast<size_t>(slots[s]) * row_bytes_);
      if (in_.scale != CombineScale::kNone) {
        const size_t route = static_cast<size_t>(pair.route_begin[index]) + s;
        groups.weights.push_back(scale_of(pair, token, route));
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

// `tokens`: ascending, those whose parts the peer's chunks hold.
template <class Visit>
bool CombineSum::each_chunk_of(
    const ChunkSignals& signals,
    size_t peer,
    std::span<const int32_t> tokens,
    int64_t unit,
    const Visit& visit
) const {
  if (signals.num_chunks_from(peer) == 0) {
    return true;
  }
  const auto chunks_before = [&](int64_t token) {
    const auto at = std::lower_bound(tokens.begin(), tokens.end(), static_cast<int32_t>(token));
    return num_chunks(at - tokens.begin());
  };
  const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
  // The last chunk of the unit before may hold this one's first.
  const int64_t begin = std::max<int64_t>(0, chunks_before(range.first) - 1);
  const int64_t end = chunks_before(range.last);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    if (!visit(signals, peer, chunk)) {
      return false;
    }
  }
  return true;
}

template <class Visit>
void CombineSum::each_chunk(int64_t unit, const Visit& visit) const {
  for (size_t peer = 0; peer < arrived_.num_peers(); ++peer) {
    if (!each_chunk_of(arrived_, peer, plan_.sent[peer].token, unit, visit)) {
      return;
    }
  }
  for (size_t peer = 0; plan_.between && peer < crossed_.num_peers(); ++peer) {
    const auto domain = plan_.between->domains->domain_of(static_cast<int>(peer));
    const std::vector<int32_t>& tokens = plan_.between->sent[static_cast<size_t>(domain)];
    if (!each_chunk_of(crossed_, peer, tokens, unit, visit)) {
      return;
    }
  }
}

bool CombineSum::is_complete(int64_t unit) const {
  bool is_whole = true;
  each_chunk(unit, [&](const ChunkSignals& signals, size_t peer, int64_t chunk) {
    is_whole = signals.is_complete(peer, chunk);
    return is_whole;
  });
  return is_whole;
}

bool CombineSum::has_ready() const {
  const int64_t unit = next_.load(std::memory_order_relaxed);
  return unit < num_units_ && is_complete(unit);
}

void CombineSum::add_missing(std::vector<Missing>& late) const {
  const int64_t unit = next_.load(std::memory_order_relaxed);
  each_chunk(
      std::min(unit, num_units_),
      [&](const ChunkSignals& signals, size_t peer, int64_t chunk) {
        if (!signals.is_complete(peer, chunk)) {
          late.push_back(signals.missing(peer, chunk));
          add_behind(&signals == &crossed_, late.back(), late);
        }
        return true;
      }
  );
}

// A carrier that is late may wait for a rank of its domain.
void CombineSum::add_behind(bool is_carrier, Missing carrier, std::vector<Missing>& late) const {
  if (!is_carrier) {
    return;
  }
  const Domains& domains = *plan_.between->domains;
  for (const int member : domains.members(domains.domain_of(carrier.peer))) {
    if (member != carrier.peer && plan_.sent[static_cast<size_t>(member)].size() > 0) {
      Missing behind = carrier;
      behind.peer = member;
      behind.via = carrier.peer;
      late.push_back(behind);
    }
  }
}

}  // namespace weft
