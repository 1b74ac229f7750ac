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

  // Collective, before any run(): kSourceWeights are held by the token ranks and used by the expert
  // ranks.
  void swap_source_weights() {
    const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
    const size_t num_ranks = plan_.sent.size();
    std::vector<Missing> wanted;
    for (size_t step = 1; step < num_ranks; ++step) {
      const size_t peer = (self_ + step) % num_ranks;
      const Arrivals& pair = plan_.sent[peer];
      std::vector<float> routes(pair.slot.size());
      gather_weights(plan_, pair, {0, pair.size()}, weights, routes.data());
      const uint32_t own_signal = call_.rank.signals.source_weights(self_);
      const Put put = put_to(call_.words[peer].source_weights, 0, routes, own_signal);
      call_.rank.transport.put(static_cast<int>(peer), {&put, 1});
      wanted.push_back(once_more(call_.rank, peer, call_.rank.signals.source_weights(peer)));
    }
    call_.rank.waiter.until_raised(
        {.op = "combine", .call = call_.number, .what = "source weights"}, wanted
    );
  }

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // One chunk for every token rank but this one, those of other domains first. Any worker, each
  // unit once.
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
        send_weights(peer, range, signal, scratch.weights);
      }
    }
  }

  // Waits until every token rank that reads rows here has done so: the caller may then change them.
  void wait_for_readers() const {
    std::vector<Missing> wanted;
    for (size_t peer = 0; peer < plan_.received.size(); ++peer) {
      if (peer != self_ && reads_itself(peer)) {
        wanted.push_back(once_more(call_.rank, peer, call_.rank.signals.rows_read(peer)));
      }
    }
    call_.rank.waiter.until_raised(
        {.op = "combine", .call = call_.number, .what = "word that it has read the rows"}, wanted
    );
  }

 private:
  // Who takes the partial sums of a token rank's arrivals, and where in its area they begin.
  struct Taker {
    size_t rank;
    int64_t first_row;
    uint32_t first_signal;
    bool has_rows_itself;  // and needs no sums
  };
  [[nodiscard]] Taker taker_of(size_t peer) const {
    if (is_near(plan_, peer)) {
      const uint32_t signal = call_.rank.signals.combine(self_, 0);
      return {peer, 0, signal, reads_itself(peer)};
    }
    const Domains& domains = *plan_.between->domains;
    const int p = static_cast<int>(peer);
    const auto forwarder = static_cast<size_t>(domains.forwarder(p, plan_.shape.rank));
    // CombineForward::rows_of_ is the same from the other side.
    const bool has_rows = forwarder == self_ ||
                          (reads_itself(forwarder) && in_.scale != CombineScale::kSourceWeights);
    const uint32_t signal = call_.rank.signals.forwarded(domains.pair_at_forwarder(p), 0);
    return {forwarder, plan_.between->first_row[peer], signal, has_rows};
  }

  [[nodiscard]] bool reads_itself(size_t peer) const {
    return call_.said[peer].own_rows.region.generation != 0;
  }

  void send_weights(size_t to, ChunkRange range, uint32_t signal, std::vector<float>& weights)
      const {
    const Arrivals& pair = plan_.received[to];
    const auto* row_weights = reinterpret_cast<const float*>(in_.weights.data);
    const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
    const auto last = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.last)]);
    weights.clear();
    for (size_t j = first; j < last; ++j) {
      weights.push_back(row_weights[row_weight_index(plan_, pair, j)]);
    }
    const Put put = put_to(call_.words[to].weights, first, weights, signal);
    call_.rank.transport.put(static_cast<int>(to), {&put, 1});
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
