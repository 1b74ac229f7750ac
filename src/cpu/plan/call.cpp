// SPDX-License-Identifier: Apache-2.0
// plan: counts travel, then slots; routing tables never do. Previous in the data flow:
// plan/build.hpp; next: dispatch_call.cpp.
#include <algorithm>
#include <cstring>

#include "cpu/exchange.hpp"
#include "cpu/plan/records.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// Everyone's counts, out of the words of this call and what followed them.
std::vector<RankCounts> counts_of(
    const CallBoard& board, std::span<const CallWord> words, int num_experts
) {
  std::vector<RankCounts> counts;
  for (int rank = 0; rank < static_cast<int>(words.size()); ++rank) {
    const std::byte* payload = board.payload(rank).data();
    const CallWord& word = words[static_cast<size_t>(rank)];
    RankCounts& one = counts.emplace_back();
    one.num_tokens = word.num_tokens;
    one.row_budget = word.row_budget;
    one.routes.resize(static_cast<size_t>(num_experts));
    one.arrivals.resize(words.size());
    const size_t route_bytes = one.routes.size() * sizeof(int32_t);
    std::memcpy(one.routes.data(), payload, route_bytes);
    std::memcpy(one.arrivals.data(), payload + route_bytes, one.arrivals.size() * sizeof(int32_t));
  }
  return counts;
}

// Waking the other threads pays for this many routes of a part.
constexpr int64_t kRoutesOfPart = 4096;

Sharing sharing_of(WorkerPool& workers, const RouteTable& routes) {
  const int64_t most = routes.num_tokens * routes.topk / kRoutesOfPart;
  const int64_t parts = std::clamp<int64_t>(most, 1, workers.num_workers());
  return {
      .num_parts = static_cast<size_t>(parts),
      .for_each = [&workers](size_t count, const auto& visit) {
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
    check_options(options, context_);
    return read_routing(
        routing, settings_.num_experts, settings_.max_topk, settings_.max_tokens, context_
    );
  };
  return run_call(Op::kPlan, prepare, [&](const RouteTable& routes) {
    const RankCounts own = count_routes(routes, settings_.num_experts, context_.num_ranks, options);
    CallWord word = new_word(
        {.op = Op::kPlan,
         .options = options,
         .topk = routes.topk,
         .from_map = routes.from_map,
         .has_weights = !routes.weight.empty() || routing.weights.is_given()}
    );
    word.num_tokens = own.num_tokens;
    word.row_budget = own.row_budget;
    std::vector<int32_t> payload = own.routes;
    payload.insert(payload.end(), own.arrivals.begin(), own.arrivals.end());
    const std::vector<CallWord> to(static_cast<size_t>(context_.num_ranks), word);
    const std::vector<CallWord> words = board_->swap(to, std::as_bytes(std::span(payload)));
    const std::vector<RankCounts> counts = counts_of(*board_, words, settings_.num_experts);
    PlanData data = place_routes(
        routes, counts, context_.rank, options, context_, sharing_of(*workers_, routes)
    );
    data.exchange_id = id_;
    data.call = call_number_;
    std::vector<int64_t> rows;
    if (domains_->has_several()) {  // a carrier checks the slots of others
      rows = output_rows(group_shape(counts, settings_.num_experts, options, context_));
    }
    SwappedRecords records = swap_records(*this, data, counts, rows);
    add_received(data, std::move(records.received));
    if (domains_->has_several()) {
      data.between = make_domain_traffic(data, domains_, std::move(records.carried));
    }
    ++counters_.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

}  // namespace weft
