// SPDX-License-Identifier: Apache-2.0
// The receiving role of combine: adds a token's partial sums in rank order, and those of other
// domains in domain order, as soon as the chunks that hold them are complete, and puts weight
// gradients back where the weights came from.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/chunk_work.hpp"
#include "cpu/combine/rows.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Traffic to a rank that adds by rank; topk.hpp has the same by choice.
inline ChunkTraffic sum_traffic(const PlanData& plan, const CombineRows& rows, bool has_weights) {
  ChunkTraffic traffic = {.puts_per_chunk = has_weights ? uint64_t{1} : 0};
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    const bool is_self = peer == static_cast<size_t>(plan.shape.rank);
    const bool has_any = !is_self && (is_near(plan, peer) || has_weights);
    traffic.sources.push_back(
        {.num_arrivals = has_any ? plan.sent[peer].size() : 0,
         .puts_per_arrival = is_near(plan, peer) && !rows.reads(peer) ? uint64_t{1} : 0,
         .peer = static_cast<int>(peer)}
    );
  }
  return traffic;
}

// The sums that come back to this rank, by the forwarder that sends them. A forwarder that is late
// may wait for a rank of its domain.
inline ChunkTraffic crossing_traffic(const PlanData& plan, const CombineRows& /*rows*/) {
  ChunkTraffic traffic;
  for (int peer = 0; peer < plan.shape.num_ranks; ++peer) {
    ChunkSource& source = traffic.sources.emplace_back();
    source.peer = peer;
    source.num_arrivals = crossings_to(plan, static_cast<size_t>(peer));
    if (source.num_arrivals > 0) {
      const Domains& domains = *plan.between->domains;
      const std::span<const int> members = domains.members(domains.domain_of(peer));
      std::ranges::copy_if(members, std::back_inserter(source.behind), [&](int member) {
        return member != peer && plan.sent[static_cast<size_t>(member)].size() > 0;
      });
    }
  }
  return traffic;
}

// `Rows` lists the terms of a token: CombineRows, or TopkRows (topk.hpp).
template <class Rows>
class CombineSum final : public ChunkWork<CombineSum<Rows>> {
 public:
  CombineSum(const CpuCall& call, const CombineInput& in, const CombineOutput& out)
      : call_(call),
        plan_(call.plan),
        in_(in),
        out_(out),
        self_(static_cast<size_t>(call.plan.shape.rank)),
        row_bytes_(static_cast<size_t>(out.x.row_bytes())),
        sums_for_(codes_output(in, out) ? SumFor::kDomain : SumFor::kToken),
        has_weights_(in.weights.is_given()),
        rows_(call, in),
        arrived_(
            call.rank, call.rank.signals.combine(0, 0), sum_traffic(call.plan, rows_, has_weights_)
        ),
        crossed_(call.rank, call.rank.signals.crossing(0, 0), crossing_traffic(call.plan, rows_)),
        scratch_(static_cast<size_t>(call.rank.workers.num_workers())) {
    this->set_queues({plan_.shape.num_tokens});
  }

  // Is called after all workers have ended.
  void settle() {
    arrived_.settle();
    crossed_.settle();
  }
  // Tells the ranks whose rows were read here that they may change them.
  void release_rows() const {
    for (size_t peer = 0; peer < plan_.sent.size(); ++peer) {
      if (peer != self_ && rows_.reads(peer)) {
        const uint32_t signal = call_.rank.signals.rows_read(self_);
        call_.rank.transport.raise(static_cast<int>(peer), signal, 1);
      }
    }
  }

  // Visits the partial sums of a chunk of tokens.
  template <class Visit>
  void each_needed(size_t /*queue*/, int64_t unit, const Visit& visit) const {
    for (size_t peer = 0; peer < arrived_.num_peers(); ++peer) {
      if (!each_chunk_of(arrived_, peer, plan_.sent[peer].token, unit, visit)) {
        return;
      }
    }
    for (size_t peer = 0; plan_.between && peer < crossed_.num_peers(); ++peer) {
      const auto domain = plan_.between->domains->domain_of(static_cast<int>(peer));
      if (domain < 0) {
        continue;  // lost
      }
      const std::vector<int32_t>& tokens = plan_.between->sent[static_cast<size_t>(domain)];
      if (!each_chunk_of(crossed_, peer, tokens, unit, visit)) {
        return;
      }
    }
  }

  // Sums a chunk of tokens.
  void run(size_t /*queue*/, int64_t unit, int worker) {
    Scratch& scratch = scratch_[static_cast<size_t>(worker)];
    const ChunkRange range = chunk_range(plan_.shape.num_tokens, unit);
    rows_.list(range.first, scratch.now);
    for (int64_t token = range.first; token < range.last; ++token) {
      if (token + 1 < range.last) {
        rows_.list(token + 1, scratch.next);
      } else {
        scratch.next.rows.clear();
      }
      const RowGroups& rows = scratch.now.rows;
      std::byte* const out = out_.x.data + static_cast<size_t>(token) * row_bytes_;
      if (rows.rows.empty() && sums_for_ == SumFor::kToken) {
        std::memset(out, 0, row_bytes_);
      } else {
        add_up(in_, sums_for_, rows, out, scratch.next.rows.rows);
      }
      if (has_weights_) {
        give_weights(token);
      }
      std::swap(scratch.now, scratch.next);
    }
  }

 private:
  // Memory of one worker, in cache lines of its own.
  struct alignas(64) Scratch {
    typename Rows::Token now;
    typename Rows::Token next;
  };

  void give_weights(int64_t token) const {
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

  // Visits the peer's chunks of a unit; they hold parts of `tokens`, ascending.
  template <class Signals, class Visit>
  [[nodiscard]] bool each_chunk_of(
      const Signals& signals,
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

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  const CombineOutput& out_;
  size_t self_;
  size_t row_bytes_;
  SumFor sums_for_;
  bool has_weights_;
  Rows rows_;
  // Partial sums of this domain's ranks, or rows of all, and weights of all; by rank.
  BasicChunkSignals<typename Rows::Traffic> arrived_;
  ChunkSignals crossed_;          // by forwarder: sums of its domain
  std::vector<Scratch> scratch_;  // by worker
};

}  // namespace weft
