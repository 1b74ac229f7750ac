// SPDX-License-Identifier: Apache-2.0
// The sending role of dispatch: puts rows of this rank's tokens, once to each rank of its domain
// that needs them and once to its forwarder in each other domain.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "cpu/dispatch/row_stream.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class DispatchPush {
 public:
  DispatchPush(
      const CpuCall& call,
      std::span<const RowStream> streams,
      const ConstTensor& weights,
      const RowWeights& row_weights
  )
      : call_(call),
        plan_(call.plan),
        streams_(streams),
        weights_(reinterpret_cast<const float*>(weights.data)),
        row_weights_(row_weights),
        self_(static_cast<size_t>(call.plan.shape.rank)) {
    const size_t num_ranks = plan_.sent.size();
    for (size_t step = 1; step < num_ranks; ++step) {
      const size_t peer = (self_ + step) % num_ranks;
      (is_near(plan_, peer) ? near_ : far_).push_back(peer);
    }
    for (const Arrivals& pair : plan_.sent) {
      num_units_ = std::max(num_units_, num_chunks(pair.size()));
    }
    if (plan_.between) {
      const auto& sent = plan_.between->sent;
      const auto own = static_cast<size_t>(plan_.between->domains->own());
      for (size_t step = 1; step < sent.size(); ++step) {
        domains_.push_back((own + step) % sent.size());
        const auto num_tokens = static_cast<int64_t>(sent[domains_.back()].size());
        num_units_ = std::max(num_units_, num_chunks(num_tokens));
      }
    }
  }

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // Sends a chunk to every receiver, other domains first, this rank last. Any worker, each unit
  // once. Receivers mostly take the same tokens, so a chunk's rows are read from memory once.
  void run(int64_t unit) const {
    for (const size_t domain : domains_) {
      send_across(domain, unit);
    }
    if (weights_ != nullptr) {
      for (const size_t peer : far_) {
        send_weights(peer, unit);
      }
    }
    for (const size_t peer : near_) {
      send(peer, unit);
    }
    keep(unit);
  }

 private:
  void send(size_t to, int64_t chunk) const {
    const Arrivals& pair = plan_.sent[to];
    const PairChunk part = {
        .to = to,
        .pair = pair,
        .range = chunk_range(pair.size(), chunk),
        .signal = call_.rank.signals.dispatch(self_, chunk),
        .first_row = 0};
    if (part.range.first == part.range.last) {
      return;
    }
    PutList puts;
    for (const RowStream& stream : streams_) {
      add_rows(puts, call_, part, stream, [&](int64_t i) {
        return stream.token(pair.token[static_cast<size_t>(i)]);
      });
    }
    std::array<float, kChunkArrivals * kMaxTopk> weights;
    if (weights_ != nullptr) {
      puts.add(weights_put(to, part.range, part.signal, weights));
    }
    puts.send(call_.rank.transport, to, part.signal);
  }

  // Sends each token once, to the forwarder.
  void send_across(size_t domain, int64_t chunk) const {
    const std::vector<int32_t>& tokens = plan_.between->sent[domain];
    const ChunkRange range = chunk_range(static_cast<int64_t>(tokens.size()), chunk);
    const auto to = static_cast<size_t>(
        plan_.between->domains->forwarder_into(static_cast<int>(domain), plan_.shape.rank)
    );
    const uint32_t signal = call_.rank.signals.crossing(self_, chunk);
    PutList puts;
    for (const RowStream& stream : streams_) {
      const Target& target = call_.words[to].*stream.target;
      for (int64_t i = range.first; i < range.last; ++i) {
        const std::byte* row = stream.token(tokens[static_cast<size_t>(i)]);
        puts.add(put_to(target, i, row, stream.row_bytes, signal));
      }
    }
    puts.send(call_.rank.transport, to, signal);
  }

  // Weights go straight to a rank of another domain; they are few and need no forwarder.
  void send_weights(size_t to, int64_t chunk) const {
    const ChunkRange range = chunk_range(plan_.sent[to].size(), chunk);
    if (range.first == range.last) {
      return;
    }
    const uint32_t signal = call_.rank.signals.dispatch(self_, chunk);
    std::array<float, kChunkArrivals * kMaxTopk> weights;
    const Put put = weights_put(to, range, signal, weights);
    call_.rank.transport.put(static_cast<int>(to), {&put, 1});
  }

  // Arrivals from this rank to itself go to all their slots at once.
  void keep(int64_t chunk) const {
    const Arrivals& pair = plan_.sent[self_];
    const ChunkRange range = chunk_range(pair.size(), chunk);
    for (const RowStream& stream : streams_) {
      stream.store_rows(stream.out, pair, range, [&](int64_t i) {
        return stream.token(pair.token[static_cast<size_t>(i)]);
      });
    }
    for (int64_t i = range.first; weights_ != nullptr && i < range.last; ++i) {
      std::array<float, kMaxTopk> weights;
      gather_weights(plan_, pair, {i, i + 1}, weights_, weights.data());
      row_weights_.put(pair, i, weights.data());
    }
    streaming_fence();
  }

  // Gathers weights of a chunk in `memory`, which must live until they are sent.
  [[nodiscard]] Put weights_put(
      size_t to, ChunkRange range, uint32_t signal, std::span<float> memory
  ) const {
    const Arrivals& pair = plan_.sent[to];
    const size_t count = gather_weights(plan_, pair, range, weights_, memory.data());
    const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
    return put_to(call_.words[to].weights, first, memory.first(count), signal);
  }

  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const float* weights_;  // null: none travel
  const RowWeights& row_weights_;
  size_t self_;
  std::vector<size_t> near_;     // ranks of this domain, from the one after this rank on
  std::vector<size_t> far_;      // ranks of other domains, likewise
  std::vector<size_t> domains_;  // other domains, likewise
  int64_t num_units_ = 0;
};

}  // namespace weft
