// SPDX-License-Identifier: Apache-2.0
// The sending role of combine: sums an arrival's rows where the experts are and returns one row to
// the token's rank, or to the carrier that adds up this domain's, with the gradients of its
// weights.
#pragma once

#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"
#include "cpu/combine/row_sum.hpp"
#include "cpu/combine/send_sums.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class CombineReduce {
 public:
  // Memory of one worker.
  struct Scratch {
    std::vector<std::byte> rows;  // a chunk that cannot be stored at the peer directly
    std::vector<float> weights;
    std::vector<const std::byte*> terms;
    std::vector<const std::byte*> next;
  };

  CombineReduce(const CpuRank& rank, const CpuCall& call, const CombineInput& in)
      : rank_(rank),
        call_(call),
        plan_(call.plan),
        in_(in),
        self_(static_cast<size_t>(call.plan.shape.rank)),
        row_bytes_(static_cast<size_t>(in.rows.row_bytes())) {
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
      std::vector<float> routes;
      routes.reserve(pair.slot.size());
      for (size_t a = 0; a < pair.token.size(); ++a) {
        const auto end = static_cast<size_t>(pair.route_begin[a + 1]);
        for (auto j = static_cast<size_t>(pair.route_begin[a]); j < end; ++j) {
          routes.push_back(weights[weight_index(plan_, pair.token[a], pair.k[j])]);
        }
      }
      const Target& target = call_.words[peer].source_weights;
      const Put put = {
          .source = routes.data(),
          .bytes = routes.size() * sizeof(float),
          .region = target.region.slot,
          .signal = rank_.signals.source_weights(static_cast<uint32_t>(self_)),
          .offset = target.offset};
      rank_.transport.put(static_cast<int>(peer), {&put, 1});
      const uint32_t signal = rank_.signals.source_weights(static_cast<uint32_t>(peer));
      wanted.push_back(
          {.peer = static_cast<int>(peer), .signal = signal, .wanted = ++rank_.settled[signal]}
      );
    }
    rank_.waiter.until_raised(
        {.op = "combine", .call = call_.number, .what = "source weights"}, wanted
    );
  }

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // One chunk for every token rank but this one, those of other domains first. Any worker, each
  // unit once.
  void run(int64_t unit, Scratch& scratch) const {
    for (const auto& [peer, taker] : peers_) {
      const ChunkRange range = chunk_range(plan_.received[peer].size(), unit);
      if (range.first == range.last) {
        continue;
      }
      const auto chunk = static_cast<uint32_t>(unit);
      if (!taker.has_rows_itself) {
        const SumChunk sums = {
            .to = taker.rank,
            .first_row = taker.first_row + range.first,
            .num_rows = range.last - range.first,
            .row_bytes = row_bytes_,
            .signal = taker.first_signal + chunk};
        send_sums(rank_, call_, sums, scratch.rows, [&, peer = peer](int64_t i, std::byte* row) {
          reduce(peer, range.first + i, row, scratch);
        });
      }
      if (in_.weights.is_given()) {
        const uint32_t signal = rank_.signals.combine(static_cast<uint32_t>(self_), chunk);
        send_weights(peer, range, signal, scratch);
      }
    }
  }

  // Until every token rank that reads rows here has done so: the caller may then change them.
  void wait_for_readers() const {
    std::vector<Missing> wanted;
    for (size_t peer = 0; peer < plan_.received.size(); ++peer) {
      if (peer != self_ && reads_itself(peer)) {
        const uint32_t signal = rank_.signals.rows_read(static_cast<uint32_t>(peer));
        wanted.push_back(
            {.peer = static_cast<int>(peer), .signal = signal, .wanted = ++rank_.settled[signal]}
        );
      }
    }
    rank_.waiter.until_raised(
        {.op = "combine", .call = call_.number, .what = "word that it has read the rows"}, wanted
    );
  }

 private:
  // The partial sum of one arrival that came from `peer`, rounded to the dtype.
  void reduce(size_t peer, int64_t arrival, std::byte* out, Scratch& scratch) const {
    const Arrivals& pair = plan_.received[peer];
    const auto list_rows = [&](int64_t i, std::vector<const std::byte*>& rows) {
      rows.clear();
      for (const int32_t slot : pair.slots(i)) {
        rows.push_back(in_.rows.data + static_cast<size_t>(slot) * row_bytes_);
      }
    };
    list_rows(arrival, scratch.terms);
    scratch.next.clear();
    if (arrival + 1 < pair.size()) {
      list_rows(arrival + 1, scratch.next);
    }
    const float* scale = scale_of(peer, arrival);
    sum_rows(out, scratch.terms, scale, in_.rows.dtype, in_.rows.cols, scratch.next);
  }

  // Who takes the partial sums of a token rank's arrivals, and where in its area they begin.
  struct Taker {
    size_t rank;
    int64_t first_row;
    uint32_t first_signal;
    bool has_rows_itself;  // and needs no sums
  };
  [[nodiscard]] Taker taker_of(size_t peer) const {
    if (is_near(plan_, peer)) {
      const uint32_t signal = rank_.signals.combine(static_cast<uint32_t>(self_), 0);
      return {peer, 0, signal, reads_itself(peer)};
    }
    const Domains& domains = *plan_.between->domains;
    const int p = static_cast<int>(peer);
    const auto carrier = static_cast<size_t>(domains.carrier(p, plan_.shape.rank));
    // CombineCarry::rows_of_ is the same from the other side.
    const bool has_rows =
        carrier == self_ || (reads_itself(carrier) && in_.scale != CombineScale::kSourceWeights);
    const uint32_t signal = rank_.signals.carried(domains.pair_at_carrier(p), 0);
    return {carrier, plan_.between->first_row[peer], signal, has_rows};
  }

  [[nodiscard]] bool reads_itself(size_t peer) const {
    return call_.said[peer].own_rows.region.generation != 0;
  }

  void send_weights(size_t to, ChunkRange range, uint32_t signal, Scratch& scratch) const {
    const Arrivals& pair = plan_.received[to];
    const auto* row_weights = reinterpret_cast<const float*>(in_.weights.data);
    const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
    const auto last = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.last)]);
    scratch.weights.clear();
    for (size_t j = first; j < last; ++j) {
      scratch.weights.push_back(row_weights[row_weight_index(plan_, pair, j)]);
    }
    const Target& target = call_.words[to].weights;
    const Put put = {
        .source = scratch.weights.data(),
        .bytes = scratch.weights.size() * sizeof(float),
        .region = target.region.slot,
        .signal = signal,
        .offset = target.offset + first * sizeof(float)};
    rank_.transport.put(static_cast<int>(to), {&put, 1});
  }

  // Factors of an arrival's rows, or null. Only layouts of one row per route are scaled.
  [[nodiscard]] const float* scale_of(size_t peer, int64_t arrival) const {
    const Arrivals& pair = plan_.received[peer];
    const auto a = static_cast<size_t>(arrival);
    const auto first = static_cast<size_t>(pair.route_begin[a]);
    switch (in_.scale) {
      case CombineScale::kNone:
        return nullptr;
      case CombineScale::kPlanWeights:
        return pair.weight.data() + first;
      case CombineScale::kSourceWeights:
        break;
    }
    const std::byte* staged = call_.staging_data + call_.staging.source_weights[peer];
    return reinterpret_cast<const float*>(staged) + first;
  }

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t self_;
  size_t row_bytes_;
  std::vector<std::pair<size_t, Taker>> peers_;  // in the order of sending
  int64_t num_units_ = 0;
};

}  // namespace weft
