// SPDX-License-Identifier: Apache-2.0
// The sending role of combine: sums an arrival's rows where the experts are and returns one row to
// the token's rank, or to the forwarder that adds up this domain's, with the gradients of its
// weights.
#pragma once

#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"
#include "cpu/combine/rows.hpp"
#include "cpu/combine/weights.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class CombineReduce {
 public:
  CombineReduce(const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        self_(static_cast<size_t>(call.plan.shape.rank)),
        scratch_(static_cast<size_t>(call.rank.workers.num_workers())) {
    const size_t num_ranks = plan_.received.size();
    for (const bool wants_near : {false, true}) {
      for (size_t step = 1; step < num_ranks; ++step) {
        const size_t peer = (self_ + step) % num_ranks;
        if (wants_near == is_near(plan_, peer)) {
          peers_.emplace_back(peer, taker_of(peer));
          num_units_ = std::max(num_units_, num_chunks(plan_.received[peer].size()));
        }
      }
    }
  }

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // Sends a chunk to every token rank but this one, other domains first. Any worker, each unit
  // once.
  void run(int64_t unit, int worker) {
    SumScratch& scratch = scratch_[static_cast<size_t>(worker)];
    for (const auto& [peer, taker] : peers_) {
      const ChunkRange range = chunk_range(plan_.received[peer].size(), unit);
      if (range.first == range.last) {
        continue;
      }
      if (!taker.has_rows_itself) {
        const SumChunk sums = {
            .to = taker.rank,
            .first_row = taker.first_row + range.first,
            .num_rows = range.last - range.first,
            .signal = taker.first_signal + static_cast<uint32_t>(unit)};
        const Arrivals& pair = plan_.received[peer];
        const auto source_weight = staged_weights(call_, peer);
        send_sums(call_, in_, sums, scratch, [&](int64_t i, RowGroups& groups) {
          add_arrival(in_, in_.rows.data, pair, range.first + i, source_weight, groups);
        });
      }
      if (in_.weights.is_given()) {
        const uint32_t signal = call_.rank.signals.combine(self_, unit);
        send_weights(call_, in_, peer, range, signal, scratch.weights);
      }
    }
  }

 private:
  // Rank that takes the partial sums of a token rank's arrivals, and where in its area they begin.
  struct Taker {
    size_t rank;
    int64_t first_row;
    uint32_t first_signal;
    bool has_rows_itself;  // and needs no sums
  };
  [[nodiscard]] Taker taker_of(size_t peer) const {
    if (is_near(plan_, peer)) {
      const uint32_t signal = call_.rank.signals.combine(self_, 0);
      return {peer, 0, signal, is_reader(call_, peer)};
    }
    const Domains& domains = *plan_.between->domains;
    const int p = static_cast<int>(peer);
    const auto forwarder = static_cast<size_t>(domains.forwarder(p, plan_.shape.rank));
    // CombineForward::rows_of_ is the same from the other side.
    const bool has_rows = forwarder == self_ || (is_reader(call_, forwarder) &&
                                                 in_.scale != CombineScale::kSourceWeights);
    const uint32_t signal = call_.rank.signals.forwarded(domains.pair_at_forwarder(p), 0);
    return {forwarder, plan_.between->first_row[peer], signal, has_rows};
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t self_;
  std::vector<SumScratch> scratch_;              // by worker
  std::vector<std::pair<size_t, Taker>> peers_;  // in the order of sending
  int64_t num_units_ = 0;
};

}  // namespace weft
