// SPDX-License-Identifier: Apache-2.0
#include "simulate/traffic.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "cpu/protocol/region_map.hpp"
#include "plan/build.hpp"
#include "weft/routing.hpp"

namespace weft::sim {
namespace {

template <class... Args>
void require(bool is_good, fmt::format_string<Args...> text, Args&&... args) {
  WEFT_CHECK_ARG(
      Context{}, is_good, "simulate: {}", fmt::format(text, std::forward<Args>(args)...)
  );
}

// Throws Error (kInvalidArgument) naming the number that does not fit.
void check_scenario(const Scenario& scenario) {
  require(
      scenario.num_ranks >= 1 && scenario.num_ranks <= kMostRanks,
      "num_ranks = {} (1 to {})",
      scenario.num_ranks,
      kMostRanks
  );
  require(
      scenario.ranks_per_domain >= 1 && scenario.num_ranks % scenario.ranks_per_domain == 0,
      "num_ranks = {} is not a multiple of ranks_per_domain = {}",
      scenario.num_ranks,
      scenario.ranks_per_domain
  );
  require(
      scenario.num_experts >= scenario.num_ranks && scenario.num_experts % scenario.num_ranks == 0,
      "num_experts = {} is not a positive multiple of num_ranks = {}",
      scenario.num_experts,
      scenario.num_ranks
  );
  require(
      scenario.topk >= 1 && scenario.topk <= kMaxTopk,
      "topk = {} (1 to {})",
      scenario.topk,
      kMaxTopk
  );
  require(
      scenario.max_tokens >= 0 && scenario.row_bytes >= 16 && scenario.row_bytes % 16 == 0 &&
          scenario.pad_multiple >= 1,
      "max_tokens = {} (at least 0), row_bytes = {} (a multiple of 16), pad_multiple = {} "
      "(at least 1)",
      scenario.max_tokens,
      scenario.row_bytes,
      scenario.pad_multiple
  );
}

// Goes through every route once.
class TrafficCounter {
 public:
  TrafficCounter(const Scenario& scenario, Traffic& traffic)
      : scenario_(scenario),
        traffic_(traffic),
        rank_seen_(static_cast<size_t>(scenario.num_ranks), -1),
        domain_seen_(static_cast<size_t>(scenario.num_domains()), -1) {}

  void add(int source, const RouteTable& table) {
    for (int64_t token = 0; token < table.num_tokens; ++token, ++stamp_) {
      const size_t first = static_cast<size_t>(token * table.topk);
      bool has_route = false;
      for (const int32_t expert :
           std::span(table.expert).subspan(first, static_cast<size_t>(table.topk))) {
        if (expert >= 0) {
          add_route(source, scenario_.owner_of(expert));
          has_route = true;
        }
      }
      num_tokens_ += has_route ? 1 : 0;
    }
  }

  [[nodiscard]] double domains_per_token() const {
    return num_tokens_ > 0 ? static_cast<double>(num_pairs_) / static_cast<double>(num_tokens_) : 0;
  }

 private:
  RankTraffic& rank(int rank) { return traffic_.ranks[static_cast<size_t>(rank)]; }

  void add_route(int source, int to) {
    const int domain = scenario_.domain_of(to);
    const bool is_remote = domain != scenario_.domain_of(source);
    ++rank(to).routes;
    rank(source).card_out_per_route += is_remote ? 1 : 0;
    if (rank_seen_[static_cast<size_t>(to)] != stamp_) {
      rank_seen_[static_cast<size_t>(to)] = stamp_;
      add_arrival(source, to, is_remote);
    }
    if (domain_seen_[static_cast<size_t>(domain)] != stamp_) {
      domain_seen_[static_cast<size_t>(domain)] = stamp_;
      ++num_pairs_;
      ++traffic_.domain_rows
            [static_cast<size_t>(source) * domain_seen_.size() + static_cast<size_t>(domain)];
      if (is_remote && !scenario_.is_flat) {
        ++rank(source).card_out;
        ++rank(scenario_.forwarder(source, domain)).card_in;
      }
    }
  }

  void add_arrival(int source, int to, bool is_remote) {
    ++rank(to).arrivals;
    rank(source).card_out_per_rank += is_remote ? 1 : 0;
    if (is_remote && scenario_.is_flat) {
      ++rank(source).card_out;
      ++rank(to).card_in;
      return;
    }
    const int sender = is_remote ? scenario_.forwarder(source, scenario_.domain_of(to)) : source;
    if (sender != to) {
      ++rank(sender).link_out;
      ++rank(to).link_in;
      rank(sender).forwarded += is_remote ? 1 : 0;
    }
  }

  const Scenario& scenario_;
  Traffic& traffic_;
  std::vector<int64_t> rank_seen_;  // last token that went there
  std::vector<int64_t> domain_seen_;
  int64_t stamp_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_pairs_ = 0;  // (token, domain)
};

// Signals follow from the number of rows that each pair moves.
void count_signals(const Scenario& scenario, int64_t message_rows, Traffic& traffic) {
  const int num_domains = scenario.num_domains();
  for (int source = 0; source < scenario.num_ranks; ++source) {
    RankTraffic& sender = traffic.ranks[static_cast<size_t>(source)];
    for (int to = 0; to < scenario.num_ranks; ++to) {
      const int32_t arrivals = traffic.arrivals(source, to);
      const int domain = scenario.domain_of(to);
      const bool is_remote = domain != scenario.domain_of(source);
      const bool is_direct = !is_remote || scenario.is_flat;
      const int forwarder = is_direct ? source : scenario.forwarder(source, domain);
      if (forwarder != to) {
        traffic.ranks[static_cast<size_t>(to)].dispatch_signals += num_chunks(arrivals);
        traffic.ranks[static_cast<size_t>(forwarder)].combine_signals += num_chunks(arrivals);
      }
      sender.messages_out += is_remote && is_direct ? count_messages(arrivals, message_rows) : 0;
    }
    for (int domain = 0; domain < num_domains && !scenario.is_flat; ++domain) {
      if (domain != scenario.domain_of(source)) {
        const int32_t rows = traffic.domain_rows
                                 [static_cast<size_t>(source) * static_cast<size_t>(num_domains) +
                                  static_cast<size_t>(domain)];
        sender.messages_out += count_messages(rows, message_rows);
        sender.combine_signals += num_chunks(rows);
        traffic.ranks[static_cast<size_t>(scenario.forwarder(source, domain))].dispatch_signals +=
            num_chunks(rows);
      }
    }
  }
  for (RankTraffic& rank : traffic.ranks) {
    rank.dispatch_raises = rank.link_in + rank.card_in;
    rank.combine_raises = rank.link_out + rank.card_out;
  }
}

}  // namespace

std::span<const TrafficField> traffic_fields() {
  static constexpr std::array<TrafficField, 15> kFields = {
      {{"num_rows", &RankTraffic::num_rows},
       {"routes", &RankTraffic::routes},
       {"arrivals", &RankTraffic::arrivals},
       {"link_out", &RankTraffic::link_out},
       {"link_in", &RankTraffic::link_in},
       {"forwarded", &RankTraffic::forwarded},
       {"card_out", &RankTraffic::card_out},
       {"card_in", &RankTraffic::card_in},
       {"card_out_per_rank", &RankTraffic::card_out_per_rank},
       {"card_out_per_route", &RankTraffic::card_out_per_route},
       {"messages_out", &RankTraffic::messages_out},
       {"dispatch_signals", &RankTraffic::dispatch_signals},
       {"dispatch_raises", &RankTraffic::dispatch_raises},
       {"combine_signals", &RankTraffic::combine_signals},
       {"combine_raises", &RankTraffic::combine_raises}}};
  static_assert(sizeof(RankTraffic) == kFields.size() * sizeof(int64_t), "a field is missing");
  return kFields;
}

int64_t count_messages(int64_t rows, int64_t message_rows) {
  const auto messages_of = [&](int64_t count) { return (count + message_rows - 1) / message_rows; };
  return rows / kChunkArrivals * messages_of(kChunkArrivals) + messages_of(rows % kChunkArrivals);
}

Traffic count_traffic(
    const Scenario& scenario, int64_t message_rows, std::span<const RouteTable> routes
) {
  check_scenario(scenario);
  WEFT_CHECK_ARG(
      Context{},
      routes.size() == static_cast<size_t>(scenario.num_ranks),
      "simulate: routing of {} ranks (num_ranks = {})",
      routes.size(),
      scenario.num_ranks
  );
  Traffic traffic;
  traffic.ranks.resize(routes.size());
  traffic.domain_rows.resize(routes.size() * static_cast<size_t>(scenario.num_domains()));
  PlanOptions options;
  options.pad_multiple = scenario.pad_multiple;
  TrafficCounter counter(scenario, traffic);
  for (int rank = 0; rank < scenario.num_ranks; ++rank) {
    const RouteTable& table = routes[static_cast<size_t>(rank)];
    traffic.counts.push_back(count_routes(table, scenario.num_experts, scenario.num_ranks, options)
    );
    counter.add(rank, table);
  }
  traffic.domains_per_token = counter.domains_per_token();
  const GroupShape shape = group_shape(traffic.counts, scenario.num_experts, options, {});
  for (size_t rank = 0; rank < routes.size(); ++rank) {
    traffic.ranks[rank].num_rows = shape.outputs[rank].num_rows;
  }
  count_signals(scenario, message_rows, traffic);
  return traffic;
}

}  // namespace weft::sim
