// SPDX-License-Identifier: Apache-2.0
// Work of combine's sending roles beside rows, whatever the order of sums: weights of routes and
// their gradients, and the wait for ranks that read rows here.
#pragma once

#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"

namespace weft {

// True if this rank has told `peer` where its rows are, to be read.
[[nodiscard]] inline bool is_reader(const CpuCall& call, size_t peer) {
  return call.said[peer].own_rows.region.generation != 0;
}

// Waits until every token rank that reads rows here has done so: the caller may then change them.
inline void wait_for_readers(const CpuCall& call) {
  std::vector<Missing> wanted;
  for (size_t peer = 0; peer < call.plan.received.size(); ++peer) {
    if (peer != static_cast<size_t>(call.plan.shape.rank) && is_reader(call, peer)) {
      wanted.push_back(once_more(call.rank, peer, call.rank.signals.rows_read(peer)));
    }
  }
  call.rank.waiter.until_raised(
      {.op = "combine", .call = call.number, .what = "word that it has read the rows"}, wanted
  );
}

// Collective, before any worker begins. Sends kSourceWeights from the token ranks, which hold them,
// to the expert ranks.
inline void swap_source_weights(const CpuCall& call, const CombineInput& in) {
  const auto* weights = reinterpret_cast<const float*>(in.source_weights.data);
  const size_t num_ranks = call.plan.sent.size();
  const auto self = static_cast<size_t>(call.plan.shape.rank);
  std::vector<Missing> wanted;
  for (size_t step = 1; step < num_ranks; ++step) {
    const size_t peer = (self + step) % num_ranks;
    if (call.rank.is_lost(static_cast<int>(peer))) {
      continue;
    }
    const Arrivals& pair = call.plan.sent[peer];
    std::vector<float> routes(pair.slot.size());
    gather_weights(call.plan, pair, {0, pair.size()}, weights, routes.data());
    const uint32_t own_signal = call.rank.signals.source_weights(self);
    const Put put = put_to(call.words[peer].source_weights, 0, routes, own_signal);
    call.rank.transport.put(static_cast<int>(peer), {&put, 1});
    wanted.push_back(once_more(call.rank, peer, call.rank.signals.source_weights(peer)));
  }
  call.rank.waiter.until_raised(
      {.op = "combine", .call = call.number, .what = "source weights"}, wanted
  );
}

// Sends weight gradients of some of a token rank's arrivals, gathered in `weights`.
inline void send_weights(
    const CpuCall& call,
    const CombineInput& in,
    size_t to,
    ChunkRange range,
    uint32_t signal,
    std::vector<float>& weights
) {
  const Arrivals& pair = call.plan.received[to];
  const auto* row_weights = reinterpret_cast<const float*>(in.weights.data);
  const auto first = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.first)]);
  const auto last = static_cast<size_t>(pair.route_begin[static_cast<size_t>(range.last)]);
  weights.clear();
  for (size_t j = first; j < last; ++j) {
    weights.push_back(row_weights[row_weight_index(call.plan, pair, j)]);
  }
  const Put put = put_to(call.words[to].weights, first, weights, signal);
  call.rank.transport.put(static_cast<int>(to), {&put, 1});
}

}  // namespace weft
