// SPDX-License-Identifier: Apache-2.0
// plan: counts travel, then slots; routing tables never do. Previous in the data flow:
// plan/build.hpp; next: dispatch_call.cpp.
#include <cstring>

#include "exchange/exchange_cpu.hpp"
#include "plan/build.hpp"

namespace weft {
namespace {

// Everyone's counts, out of the words of this call and what followed them.
std::vector<RankCounts> counts_of(const CpuExchange& state, std::span<const CallWord> words) {
  std::vector<RankCounts> counts;
  for (int rank = 0; rank < state.context.num_ranks; ++rank) {
    const std::byte* payload = state.board->payload(rank).data();
    const CallWord& word = words[static_cast<size_t>(rank)];
    RankCounts& one = counts.emplace_back();
    one.num_tokens = word.num_tokens;
    one.row_budget = word.row_budget;
    one.routes.resize(static_cast<size_t>(state.settings.num_experts));
    one.arrivals.resize(static_cast<size_t>(state.context.num_ranks));
    const size_t route_bytes = one.routes.size() * sizeof(int32_t);
    std::memcpy(one.routes.data(), payload, route_bytes);
    std::memcpy(one.arrivals.data(), payload + route_bytes, one.arrivals.size() * sizeof(int32_t));
  }
  return counts;
}

// Each pair's slots travel from source to receiver. An area is free again when its source begins
// the next plan call, for which it needs this rank's next call word.
std::vector<Arrivals> swap_records(CpuExchange& state, const PlanData& plan) {
  std::vector<Missing> wanted;
  for (int step = 1; step < state.context.num_ranks; ++step) {
    const int peer = (state.context.rank + step) % state.context.num_ranks;
    const auto p = static_cast<size_t>(peer);
    const std::vector<std::byte> records = encode_records(plan.sent[p]);
    const uint64_t length = records.size();
    std::vector<std::byte> message(sizeof length + records.size());
    std::memcpy(message.data(), &length, sizeof length);
    std::memcpy(message.data() + sizeof length, records.data(), records.size());
    const Put put = {
        .source = message.data(),
        .bytes = message.size(),
        .region = state.control_slots[p],
        .signal = state.signals.records(static_cast<uint32_t>(state.context.rank)),
        .offset = state.control_map.record_offset(static_cast<uint64_t>(state.context.rank))};
    state.transport->put(peer, {&put, 1});
    const uint32_t signal = state.signals.records(static_cast<uint32_t>(peer));
    wanted.push_back({.peer = peer, .signal = signal, .wanted = ++state.settled[signal]});
  }
  state.waiter->until_raised({.op = "plan", .call = state.call_number, .what = "records"}, wanted);
  std::vector<Arrivals> received;
  for (int source = 0; source < state.context.num_ranks; ++source) {
    const auto s = static_cast<size_t>(source);
    if (source == state.context.rank) {
      received.push_back(plan.sent[s]);
      continue;
    }
    const std::byte* area = state.control.data + state.control_map.record_offset(s);
    uint64_t length = 0;
    std::memcpy(&length, area, sizeof length);
    length = std::min(length, state.control_map.record_bytes);
    received.push_back(decode_records({area + sizeof length, length}, plan, source, state.context));
  }
  return received;
}

}  // namespace

Plan CpuExchange::make_plan(
    const Routing& routing, const PlanOptions& options, const CallOptions& /*call*/
) {
  const auto prepare = [&] {
    check_options(options, context);
    return read_routing(
        routing, settings.num_experts, settings.max_topk, settings.max_tokens, context
    );
  };
  return run_call(Op::kPlan, prepare, [&](const RouteTable& routes) {
    const RankCounts own = count_routes(routes, settings.num_experts, context.num_ranks, options);
    CallWord word = new_word(Op::kPlan);
    word.signature = {
        static_cast<int64_t>(options.layout),
        options.pad_multiple,
        options.expert_stride,
        static_cast<int64_t>(options.overflow),
        routes.topk,
        routes.from_map,
        !routes.weight.empty() || routing.weights.is_given()};
    word.num_tokens = own.num_tokens;
    word.row_budget = own.row_budget;
    std::vector<int32_t> payload = own.routes;
    payload.insert(payload.end(), own.arrivals.begin(), own.arrivals.end());
    const std::vector<CallWord> to(static_cast<size_t>(context.num_ranks), word);
    const std::vector<CallWord> words = board->swap(to, std::as_bytes(std::span(payload)));
    PlanData data = place_routes(
        routes, counts_of(*this, words), context.rank, settings.num_experts, options, context
    );
    data.exchange_id = id;
    data.call = call_number;
    add_received(data, swap_records(*this, data));
    ++counters.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

}  // namespace weft
