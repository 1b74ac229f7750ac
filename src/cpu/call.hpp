// SPDX-License-Identifier: Apache-2.0
// The rank and the call that the CPU executor works for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/protocol/call_board.hpp"
#include "cpu/protocol/region_map.hpp"
#include "cpu/protocol/staging.hpp"
#include "cpu/protocol/waiter.hpp"
#include "cpu/protocol/worker_pool.hpp"
#include "plan/plan_data.hpp"
#include "plan/without.hpp"
#include "transport/transport.hpp"
#include "weft/exchange.hpp"

namespace weft {

// Parts of a rank that all its calls share.
struct CpuRank {
  Transport& transport;
  Waiter& waiter;
  WorkerPool& workers;
  SignalMap signals;
  // [signals.size()] the number each signal has once all finished calls are accounted for. Signals
  // are never reset: a call knows from its plan by how much each will grow.
  std::vector<uint64_t>& settled;
  IsLost is_lost = none_is_lost;
};

// Parts that belong to one call.
struct CpuCall {
  const CpuRank rank;
  uint64_t number = 0;
  const PlanData& plan;
  std::span<const CallWord> words;  // by rank: where that rank wants what is sent to it
  std::span<const CallWord> said;   // by rank: what this rank told it
  const Staging& staging;
  std::byte* staging_data = nullptr;
};

// Returns where this rank reaches a `target` that a peer named; null: it cannot. Throws
// LostPeerError if the peer has broken off since and released the region.
[[nodiscard]] inline std::byte* reach(const CpuCall& call, int peer, const Target& target) {
  const Transport& transport = call.rank.transport;
  std::byte* const region = transport.mapped(peer, target.region.slot);
  WEFT_CHECK(
      (Context{call.plan.shape.rank, call.plan.shape.num_ranks, transport.name(), peer}),
      region != nullptr || target.place != Place::kEverySlot,
      ErrorCode::kTransport,
      "map: rank {} has released its region {} during call {}",
      peer,
      target.region.slot,
      call.number
  );
  return region == nullptr ? nullptr : region + target.offset;
}

// Index of the weight of (token, k) in a tensor shaped like Routing::weights.
[[nodiscard]] inline size_t weight_index(const PlanData& plan, int64_t token, int32_t k) {
  const int64_t route = token * plan.shape.topk + k;
  if (!plan.shape.from_map) {
    return static_cast<size_t>(route);
  }
  const int32_t expert = expert_of(plan.shape, plan.route_expert[static_cast<size_t>(route)]);
  return static_cast<size_t>(token * plan.shape.num_chosen_experts() + expert);
}

// Gathers weights of some arrivals in route order from a tensor like Routing::weights; returns
// their number.
inline size_t gather_weights(
    const PlanData& plan, const Arrivals& pair, ChunkRange range, const float* weights, float* out
) {
  size_t count = 0;
  for (auto a = static_cast<size_t>(range.first); a < static_cast<size_t>(range.last); ++a) {
    const auto end = static_cast<size_t>(pair.route_begin[a + 1]);
    for (auto j = static_cast<size_t>(pair.route_begin[a]); j < end; ++j) {
      out[count++] = weights[weight_index(plan, pair.token[a], pair.k[j])];
    }
  }
  return count;
}

// Makes the put of a row to place `row` of a target.
[[nodiscard]] inline Put put_to(
    const Target& target, int64_t row, const void* source, uint64_t bytes, uint32_t signal
) {
  return {
      .source = source,
      .bytes = bytes,
      .region = target.region.slot,
      .signal = signal,
      .offset = target.offset + static_cast<uint64_t>(row) * bytes};
}
// Makes the put of weights, from the pair's route `first` on.
[[nodiscard]] inline Put put_to(
    const Target& target, size_t first, std::span<const float> weights, uint32_t signal
) {
  return {
      .source = weights.data(),
      .bytes = weights.size_bytes(),
      .region = target.region.slot,
      .signal = signal,
      .offset = target.offset + first * sizeof(float)};
}

// Expects `peer` to raise `signal` once more.
[[nodiscard]] inline Missing once_more(const CpuRank& rank, size_t peer, uint32_t signal) {
  return {.peer = static_cast<int>(peer), .signal = signal, .wanted = ++rank.settled[signal]};
}

// Index of the weight of route `j` of a pair in a tensor shaped like DispatchOutput::weights.
[[nodiscard]] inline size_t row_weight_index(const PlanData& plan, const Arrivals& pair, size_t j) {
  const auto row = static_cast<size_t>(pair.slot[j]);
  return pair.one_row ? row * static_cast<size_t>(plan.shape.topk) + static_cast<size_t>(pair.k[j])
                      : row;
}

}  // namespace weft
