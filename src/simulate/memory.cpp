// SPDX-License-Identifier: Apache-2.0
#include "simulate/memory.hpp"

#include <algorithm>

#include "exchange/buffer_pool.hpp"
#include "exchange/call_board.hpp"
#include "exchange/region_map.hpp"
#include "kernels/device_control.hpp"
#include "kernels/device_plan.hpp"
#include "plan/build.hpp"

namespace weft::sim {
namespace {

// Of the arrivals of all other ranks at `rank`, with weights.
uint64_t used_records(const Scenario& scenario, const Traffic& traffic, int rank) {
  const uint64_t fixed = max_record_bytes(0, scenario.topk);
  const uint64_t of_route = max_record_bytes(1, 2) - max_record_bytes(1, 1);
  const uint64_t of_arrival = max_record_bytes(1, 1) - fixed - of_route;
  const int per_rank = scenario.num_experts / scenario.num_ranks;
  uint64_t bytes = 0;
  for (int source = 0; source < scenario.num_ranks; ++source) {
    if (source == rank) {
      continue;
    }
    const std::span<const int32_t> routes = traffic.counts[static_cast<size_t>(source)].routes;
    uint64_t num_routes = 0;
    for (const int32_t count : routes.subspan(
             static_cast<size_t>(rank) * static_cast<size_t>(per_rank),
             static_cast<size_t>(per_rank)
         )) {
      num_routes += static_cast<uint64_t>(count);
    }
    bytes += fixed + static_cast<uint64_t>(traffic.arrivals(source, rank)) * of_arrival +
             num_routes * of_route;
  }
  return bytes;
}

// Each peer's rows begin at a multiple of 64 bytes.
template <class CountOf>
uint64_t staged_rows(const Scenario& scenario, int rank, const CountOf& count_of) {
  uint64_t bytes = 0;
  for (int peer = 0; peer < scenario.num_ranks; ++peer) {
    if (peer != rank) {
      bytes = align_up(
          bytes + static_cast<uint64_t>(count_of(peer)) * static_cast<uint64_t>(scenario.row_bytes),
          64
      );
    }
  }
  return bytes;
}

Memory::Cpu reserved_by_cpu(const Scenario& scenario) {
  const auto ranks = static_cast<uint64_t>(scenario.num_ranks);
  const ControlMap map = {
      .num_ranks = ranks,
      .word_bytes = sizeof(CallWord),
      .payload_bytes = (static_cast<uint64_t>(scenario.num_experts) + ranks) * sizeof(int32_t),
      .record_bytes = max_record_bytes(scenario.max_tokens, scenario.topk)};
  const SignalMap signals = {
      .num_ranks = static_cast<uint32_t>(scenario.num_ranks),
      .max_chunks = static_cast<uint32_t>(num_chunks(scenario.max_tokens))};
  Memory::Cpu cpu;
  cpu.signals = uint64_t{signals.size()} * sizeof(uint64_t);
  cpu.words = map.record_offset(0);
  cpu.records = map.num_bytes() - map.record_offset(0);
  return cpu;
}

Memory::Gpu reserved_by_gpu(const Scenario& scenario) {
  const auto ranks = static_cast<uint32_t>(scenario.num_ranks);
  const auto experts = static_cast<uint32_t>(scenario.num_experts);
  const auto tokens = static_cast<uint32_t>(scenario.max_tokens);
  const auto topk = static_cast<uint32_t>(scenario.topk);
  const DeviceControlMap map = {ranks, experts, tokens, topk};
  const PlanMap plan = {ranks, experts, tokens, topk};
  const int64_t returned = scenario.max_tokens * std::min(scenario.num_ranks, scenario.topk);
  return {
      .signals = map.word_offset(0, 0),
      .words = map.weights_offset(0) - map.word_offset(0, 0),
      .weights = map.num_bytes() - map.weights_offset(0),
      .plan = plan.num_bytes(),
      .staging = static_cast<uint64_t>(returned * scenario.row_bytes)};
}

}  // namespace

Memory reserved_memory(const Scenario& scenario) {
  Memory memory;
  memory.cpu = reserved_by_cpu(scenario);
  memory.gpu = reserved_by_gpu(scenario);
  return memory;
}

Memory memory_of(const Scenario& scenario, const Traffic& traffic, int rank) {
  const RankTraffic& own = traffic.ranks[static_cast<size_t>(rank)];
  const auto row_bytes = static_cast<uint64_t>(scenario.row_bytes);
  Memory memory = reserved_memory(scenario);
  memory.output = static_cast<uint64_t>(own.num_rows) * row_bytes;
  memory.relay = scenario.is_flat ? 0 : static_cast<uint64_t>(own.card_in) * row_bytes;
  memory.cpu.records_used = used_records(scenario, traffic, rank);
  const uint64_t dispatched =
      staged_rows(scenario, rank, [&](int peer) { return traffic.arrivals(peer, rank); });
  const uint64_t combined =
      staged_rows(scenario, rank, [&](int peer) { return traffic.arrivals(rank, peer); });
  const uint64_t staged = std::max(dispatched, combined);
  memory.cpu.staging = staged > 0 ? size_class(staged) : 0;
  return memory;
}

}  // namespace weft::sim
