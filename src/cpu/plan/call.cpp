// SPDX-License-Identifier: Apache-2.0
// plan: counts travel, then slots; routing tables never do. Previous in the data flow:
// plan/build.hpp; next: dispatch/call.cpp.
#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "cpu/exchange.hpp"
#include "plan/balance/routing.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

struct SwappedRecords {
  std::vector<Arrivals> received;                // [num_ranks]
  std::vector<std::vector<Arrivals>> forwarded;  // [sources forwarded for][members of this domain]
};

// Collective. Each source tells each receiver the slots of their pair. In a group of several
// domains a source tells its forwarder there, in one message for all ranks of the domain; the
// forwarder keeps a copy and passes each its own. Throws Error (kTransport) for malformed records.
//
// An area of the control region is free again when its source begins the next plan call, for which
// it needs this rank's next handshake.
class RecordSwap {
 public:
  // `counts`, and the `rows` of outputs that this rank may read pairs to: by rank.
  RecordSwap(
      CpuExchange& state,
      const PlanData& plan,
      std::span<const RankCounts> counts,
      std::span<const int64_t> rows
  )
      : state_(state),
        plan_(plan),
        counts_(counts),
        rows_(rows),
        domains_(*state.domains_),
        rank_(state.context_.rank),
        num_ranks_(state.context_.num_ranks) {}

  SwappedRecords run() {
    send_own();
    pass_on();
    wait_for_all();
    return {.received = received(), .forwarded = forwarded()};
  }

 private:
  void send_own() const {
    std::vector<std::vector<std::byte>> records(plan_.sent.size());
    for_each(records.size(), [&](size_t peer) {
      if (static_cast<int>(peer) != rank_ && !state_.is_lost()(static_cast<int>(peer))) {
        records[peer] = encode_records(plan_.sent[peer]);
      }
    });
    for (int domain = 0; domain < domains_.num_domains(); ++domain) {
      if (domain != domains_.own()) {
        send_bundle(domain, records);
      }
    }
    for (int step = 1; step < num_ranks_; ++step) {
      const int peer = (rank_ + step) % num_ranks_;
      if (domains_.is_near(peer) && !state_.is_lost()(peer)) {
        send(peer, rank_, records[static_cast<size_t>(peer)]);
      }
    }
  }

  // Passes the bundle of each source that this rank forwards for, as it comes, to this domain.
  void pass_on() {
    for (const int source : domains_.forwarded()) {
      state_.waiter_->until_raised(reason(), {missing(source)});
      const auto records = bundle_of(source);
      for (size_t m = 0; m < records.size(); ++m) {
        if (domains_.near()[m] != rank_) {
          send(domains_.near()[m], source, records[m]);
        }
      }
    }
  }

  void wait_for_all() {
    std::vector<Missing> wanted;
    for (int source = 0; source < num_ranks_; ++source) {
      if (source != rank_ && !state_.is_lost()(source)) {
        wanted.push_back(missing(source));
      }
    }
    state_.waiter_->until_raised(reason(), wanted);
    for (const Missing& one : wanted) {
      state_.settled_[one.signal] = one.wanted;
    }
  }

  // [num_ranks]
  [[nodiscard]] std::vector<Arrivals> received() const {
    std::vector<Arrivals> from(static_cast<size_t>(num_ranks_));
    for_each(from.size(), [&](size_t source) {
      const bool is_own = static_cast<int>(source) == rank_;
      if (state_.is_lost()(static_cast<int>(source))) {
        from[source] = no_arrivals(plan_.shape);
      } else {
        from[source] = is_own ? plan_.sent[source] : pair_of(static_cast<int>(source), rank_);
      }
    });
    return from;
  }

  // [sources forwarded for][members of this domain] but for this rank's own, see received().
  [[nodiscard]] std::vector<std::vector<Arrivals>> forwarded() const {
    const std::span<const int> sources = domains_.forwarded();
    const std::span<const int> near = domains_.near();
    std::vector<std::vector<Arrivals>> pairs(sources.size(), std::vector<Arrivals>(near.size()));
    for_each(sources.size() * near.size(), [&](size_t i) {
      const size_t source = i / near.size();
      const size_t member = i % near.size();
      if (near[member] != rank_) {
        pairs[source][member] = pair_of(sources[source], near[member]);
      }
    });
    return pairs;
  }

  // From so many routes of a rank on its records are worth waking other threads (a guess).
  static constexpr int64_t kManyRoutes = 8192;

  void for_each(size_t count, const std::function<void(size_t)>& visit) const {
    const bool is_much = plan_.shape.num_tokens * plan_.shape.topk >= kManyRoutes;
    state_.workers_->for_each(count, is_much, visit);
  }

  [[nodiscard]] Arrivals pair_of(int source, int receiver) const {
    std::span<const std::byte> records = area_of(source);
    if (!domains_.is_near(source) && domains_.between(source) < 0) {  // this rank forwards for it
      records = bundle_of(source)[static_cast<size_t>(domains_.place_of(receiver))];
    }
    const ArrivalBounds bounds(
        plan_.shape,
        counts_[static_cast<size_t>(source)].num_tokens,
        rows_[static_cast<size_t>(receiver)]
    );
    return decode_records(records, bounds, source, state_.context_);
  }

  // Records from a source that this rank forwards for, by member of this domain.
  [[nodiscard]] std::vector<std::span<const std::byte>> bundle_of(int source) const {
    return unbundle_records(area_of(source), domains_.near().size(), source, state_.context_);
  }

  [[nodiscard]] WaitReason reason() const {
    return {.op = "plan", .call = state_.call_number_, .what = "records"};
  }

  [[nodiscard]] Missing missing(int source) const {
    const uint32_t signal = state_.signals_.records(source);
    return {
        .peer = source,
        .signal = signal,
        .wanted = state_.settled_[signal] + 1,
        .via = domains_.between(source)};
  }

  // Returns what lies in the area of `source`, its length bounded by the area's.
  [[nodiscard]] std::span<const std::byte> area_of(int source) const {
    const std::byte* area =
        state_.control_.data + state_.control_map_.record_offset(static_cast<uint64_t>(source));
    uint64_t length = 0;
    std::memcpy(&length, area, sizeof length);
    return {area + sizeof length, std::min(length, state_.control_map_.record_bytes)};
  }

  // Sends a domain's records, taken out of `records`.
  void send_bundle(int domain, std::span<std::vector<std::byte>> records) const {
    std::vector<std::vector<std::byte>> of_members;
    for (const int member : domains_.members(domain)) {
      of_members.push_back(std::move(records[static_cast<size_t>(member)]));
    }
    send(domains_.forwarder_into(domain, rank_), rank_, bundle_records(of_members));
  }

  void send(int peer, int source, std::span<const std::byte> records) const {
    const uint64_t length = records.size();
    std::vector<std::byte> message(sizeof length + records.size());
    std::memcpy(message.data(), &length, sizeof length);
    std::memcpy(message.data() + sizeof length, records.data(), records.size());
    const Put put = {
        .source = message.data(),
        .bytes = message.size(),
        .region = state_.control_slots_[static_cast<size_t>(peer)],
        .signal = state_.signals_.records(source),
        .offset = state_.control_map_.record_offset(static_cast<uint64_t>(source))};
    state_.transport_->put(peer, {&put, 1});
  }

  CpuExchange& state_;
  const PlanData& plan_;
  std::span<const RankCounts> counts_;
  std::span<const int64_t> rows_;
  const Domains& domains_;
  int rank_;
  int num_ranks_;
};

namespace {

// Returns all ranks' counts, of this call's words and their payloads.
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

// [num_ranks] the domain of each.
std::vector<int> domains_of(const Domains& domains) {
  std::vector<int> domain_of;
  for (int rank = 0; rank < domains.num_ranks(); ++rank) {
    domain_of.push_back(domains.domain_of(rank));
  }
  return domain_of;
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

}  // namespace

// Collective. Swaps counts of arrivals, which only the tokens' ranks know after balancing, in one
// more handshake, with the same word.
void CpuExchange::swap_arrivals(CallWord word, const RankCounts& own, std::span<RankCounts> all) {
  call_number_ = board_->next_call();
  word.call = call_number_;
  const std::vector<CallWord> to(all.size(), word);
  static_cast<void>(board_->swap(to, std::as_bytes(std::span(own.arrivals))));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::vector<int32_t>& arrivals = all[rank].arrivals;
    const std::byte* payload = board_->payload(static_cast<int>(rank)).data();
    std::memcpy(arrivals.data(), payload, arrivals.size() * sizeof(int32_t));
  }
}

// Collective. Makes the plan by all ranks' counts, of the same experts as `routes`.
Plan CpuExchange::plan_by_counts(
    const RouteTable& routes, std::span<const RankCounts> counts, const PlanOptions& options
) {
  PlanData data =
      place_routes(routes, counts, context_.rank, options, context_, sharing_of(*workers_, routes));
  data.shape.lost = lost_ranks();
  data.exchange_id = id_;
  data.call = call_number_;
  std::vector<int64_t> rows(counts.size(), data.num_rows);
  if (domains_->has_several()) {  // a forwarder checks the slots of others
    const GroupShape group = group_shape(counts, data.shape.num_experts, options, context_);
    std::ranges::transform(group.outputs, rows.begin(), &OutputShape::num_rows);
  }
  SwappedRecords records = RecordSwap(*this, data, counts, rows).run();
  add_received(data, std::move(records.received));
  if (domains_->has_several() || place_.is_for_gpu) {
    data.between = make_domain_traffic(data, domains_, std::move(records.forwarded));
  }
  ++counters_.num_plans;
  return Plan(std::make_shared<const PlanData>(std::move(data)));
}

Plan CpuExchange::make_plan(
    const Routing& routing, const PlanOptions& options, const CallOptions& call
) {
  const int num_ranks = context_.num_ranks;
  const auto prepare = [&] {
    check_options(options, context_);
    check_balancing(options.balance, num_ranks, settings_.num_experts, context_);
    RouteTable routes = read_routing(
        routing, settings_.num_experts, settings_.max_topk, settings_.max_tokens, context_
    );
    if (!lost_ranks().empty()) {
      drop_routes_to(lost_experts(options.balance), routes);
    }
    return routes;
  };
  std::optional<Plan> plan;
  run_call(Op::kPlan, prepare, [&](const RouteTable& routes) {
    const RankCounts own = count_routes(routes, settings_.num_experts, num_ranks, options);
    CallWord word = new_word(
        {.op = Op::kPlan,
         .number = call.number,
         .options = options,
         .topk = routes.topk,
         .from_map = routes.from_map,
         .has_weights = !routes.weight.empty() || routing.weights.is_given()}
    );
    word.num_tokens = own.num_tokens;
    word.row_budget = own.row_budget;
    std::vector<int32_t> payload = own.routes;
    payload.insert(payload.end(), own.arrivals.begin(), own.arrivals.end());
    const std::vector<CallWord> to(static_cast<size_t>(num_ranks), word);
    const std::vector<CallWord> words = board_->swap(to, std::as_bytes(std::span(payload)));
    const std::vector<RankCounts> counts = counts_of(*board_, words, settings_.num_experts);
    balance_ = options.balance;
    if (options.balance.replicas == 0) {
      plan = plan_by_counts(routes, counts, options);
      return;
    }
    const Balance balance =
        balance_counts(counts, options.balance, domains_of(*domains_), lost_ranks());
    const RouteTable physical = physical_routes(routes, balance, context_.rank);
    RankCounts mine = count_routes(physical, balance.placement.shape.count(), num_ranks, options);
    std::vector<RankCounts> all = physical_counts(counts, balance);
    if (options.layout == Layout::kRankMajor) {
      swap_arrivals(word, mine, all);
    }
    all[static_cast<size_t>(context_.rank)] = std::move(mine);
    plan = plan_by_counts(physical, all, resolved_options(options, balance));
  });
  return *std::move(plan);
}

}  // namespace weft
