// SPDX-License-Identifier: Apache-2.0
// plan: counts travel, then slots; routing tables never do. Previous in the data flow:
// plan/build.hpp; next: dispatch_call.cpp.
#include <algorithm>
#include <cstring>

#include "exchange/exchange_cpu.hpp"
#include "exchange/plan_records.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"
#include "plan/group_shape.hpp"

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

// Waking the other threads pays for this many routes of a part.
constexpr int64_t kRoutesOfPart = 4096;

Sharing sharing_of(const CpuExchange& state, const RouteTable& routes) {
  const int64_t most = routes.num_tokens * routes.topk / kRoutesOfPart;
  const int64_t parts = std::clamp<int64_t>(most, 1, state.workers->num_workers());
  return {
      .num_parts = static_cast<size_t>(parts),
      .for_each = [&workers = *state.workers](size_t count, const auto& visit) {
        workers.for_each(count, count > 1, visit);
      }};
}

// Rows of every rank's output.
std::vector<int64_t> output_rows(const GroupShape& shape) {
  std::vector<int64_t> rows;
  for (const OutputShape& output : shape.outputs) {
    rows.push_back(output.num_rows);
  }
  return rows;
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
    const std::vector<RankCounts> counts = counts_of(*this, words);
    PlanData data =
        place_routes(routes, counts, context.rank, options, context, sharing_of(*this, routes));
    data.exchange_id = id;
    data.call = call_number;
    std::vector<int64_t> rows;
    if (domains->has_several()) {  // a carrier checks the slots of others
      rows = output_rows(group_shape(counts, settings.num_experts, options, context));
    }
    SwappedRecords records = swap_records(*this, data, counts, rows);
    add_received(data, std::move(records.received));
    if (domains->has_several()) {
      data.between = make_domain_traffic(data, domains, std::move(records.carried));
    }
    ++counters.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

// Nobody waits for the dispatch: every rank throws in the plan.
void CpuExchange::refuse_routed(const Error& reason, const CallOptions& /*call*/) {
  const auto refuse = [&]() -> int { throw reason; };
  run_call(Op::kPlan, refuse, [](int) {});
}

}  // namespace weft
