// SPDX-License-Identifier: Apache-2.0
#include "plan/domain_traffic.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "plan/crossings.hpp"

namespace weft {
namespace {

std::vector<const Arrivals*> pairs_into(
    std::span<const int> members, std::span<const Arrivals> by_rank
) {
  std::vector<const Arrivals*> pairs;
  for (const int member : members) {
    pairs.push_back(&by_rank[static_cast<size_t>(member)]);
  }
  return pairs;
}

// Parts by token: counted, then filled domain by domain, so that each token's come out ascending.
void link_token_parts(const PlanData& plan, DomainTraffic& traffic) {
  const Domains& domains = *traffic.domains;
  const auto own = static_cast<size_t>(domains.own());
  std::vector<std::vector<int32_t>> tokens = traffic.sent;
  tokens[own] = crossing_tokens(pairs_into(domains.near(), plan.sent));
  traffic.token_begin.assign(static_cast<size_t>(plan.shape.num_tokens) + 1, 0);
  for (const std::vector<int32_t>& list : tokens) {
    for (const int32_t token : list) {
      ++traffic.token_begin[static_cast<size_t>(token) + 1];
    }
  }
  for (size_t t = 1; t < traffic.token_begin.size(); ++t) {
    traffic.token_begin[t] += traffic.token_begin[t - 1];
  }
  std::vector<int32_t> next(traffic.token_begin.begin(), traffic.token_begin.end() - 1);
  traffic.token_parts.resize(static_cast<size_t>(traffic.token_begin.back()));
  for (size_t domain = 0; domain < tokens.size(); ++domain) {
    for (size_t i = 0; i < tokens[domain].size(); ++i) {
      const auto place = next[static_cast<size_t>(tokens[domain][i])]++;
      const auto index = domain == own ? TokenPart::kHere : static_cast<int32_t>(i);
      traffic.token_parts[static_cast<size_t>(place)] = {static_cast<int32_t>(domain), index};
    }
  }
}

void add_carried(
    const PlanData& plan, DomainTraffic& traffic, std::vector<std::vector<Arrivals>> carried
) {
  const Domains& domains = *traffic.domains;
  const std::span<const int> near = domains.near();
  for (const int member : near) {
    if (member != plan.shape.rank) {
      const auto m = static_cast<size_t>(member);
      traffic.rows_to[m] = plan.sent[m].size();
    }
  }
  WEFT_ASSERT(carried.size() == domains.carried().size());
  for (size_t i = 0; i < carried.size(); ++i) {
    CarriedSource one = {
        .source = domains.carried()[i],
        .pairs = std::move(carried[i]),
        .crossings = {},
        .first_row = {}};
    WEFT_ASSERT(one.pairs.size() == near.size());
    std::vector<const Arrivals*> pairs;
    for (size_t m = 0; m < near.size(); ++m) {
      const auto member = static_cast<size_t>(near[m]);
      const bool is_own = near[m] == plan.shape.rank;
      pairs.push_back(is_own ? &plan.received[static_cast<size_t>(one.source)] : &one.pairs[m]);
      one.first_row.push_back(is_own ? 0 : traffic.rows_to[member]);
      traffic.rows_to[member] += is_own ? 0 : pairs.back()->size();
    }
    one.crossings = find_crossings(pairs);
    traffic.carried.push_back(std::move(one));
  }
}

// The same areas as add_carried() of the peers makes, seen from their other end.
void add_received_areas(const PlanData& plan, DomainTraffic& traffic) {
  const Domains& domains = *traffic.domains;
  for (const int member : domains.near()) {
    if (member == plan.shape.rank) {
      continue;
    }
    const auto m = static_cast<size_t>(member);
    traffic.rows_from[m] = plan.received[m].size();
    for (const int source : domains.carried_by(member)) {
      const auto s = static_cast<size_t>(source);
      traffic.first_row[s] = traffic.rows_from[m];
      traffic.rows_from[m] += plan.received[s].size();
    }
  }
}

}  // namespace

const CarriedSource* DomainTraffic::find_carried(int source) const {
  const auto found = std::ranges::lower_bound(carried, source, {}, &CarriedSource::source);
  return found == carried.end() || found->source != source ? nullptr : &*found;
}

std::shared_ptr<const DomainTraffic> make_domain_traffic(
    const PlanData& plan,
    std::shared_ptr<const Domains> domains,
    std::vector<std::vector<Arrivals>> carried
) {
  const auto num_ranks = static_cast<size_t>(plan.shape.num_ranks);
  auto traffic = std::make_shared<DomainTraffic>();
  traffic->domains = std::move(domains);
  traffic->rows_to.resize(num_ranks);
  traffic->rows_from.resize(num_ranks);
  traffic->first_row.resize(num_ranks);
  for (int domain = 0; domain < traffic->domains->num_domains(); ++domain) {
    traffic->sent.push_back(
        domain == traffic->domains->own()
            ? std::vector<int32_t>()
            : crossing_tokens(pairs_into(traffic->domains->members(domain), plan.sent))
    );
  }
  link_token_parts(plan, *traffic);
  add_carried(plan, *traffic, std::move(carried));
  add_received_areas(plan, *traffic);
  return traffic;
}

int64_t rows_to(const PlanData& plan, size_t peer) {
  return plan.between ? plan.between->rows_to[peer] : plan.sent[peer].size();
}

int64_t rows_from(const PlanData& plan, size_t peer) {
  return plan.between ? plan.between->rows_from[peer] : plan.received[peer].size();
}

int64_t crossings_from(const PlanData& plan, size_t source) {
  const CarriedSource* carried =
      plan.between ? plan.between->find_carried(static_cast<int>(source)) : nullptr;
  return carried == nullptr ? 0 : carried->crossings.size();
}

int64_t crossings_to(const PlanData& plan, size_t peer) {
  if (!plan.between) {
    return 0;
  }
  const Domains& domains = *plan.between->domains;
  const int domain = domains.domain_of(static_cast<int>(peer));
  const bool is_carrier = domains.carrier_into(domain, plan.shape.rank) == static_cast<int>(peer);
  const std::vector<int32_t>& tokens = plan.between->sent[static_cast<size_t>(domain)];
  return is_carrier ? static_cast<int64_t>(tokens.size()) : 0;
}

CrossingCount count_sent(const PlanData& plan) {
  CrossingCount count;
  for (size_t peer = 0; peer < plan.sent.size() && plan.between; ++peer) {
    count.rows += crossings_to(plan, peer);
    const bool is_far = !plan.between->domains->is_near(static_cast<int>(peer));
    count.arrivals += is_far ? plan.sent[peer].size() : 0;
  }
  return count;
}

CrossingCount count_carried(const PlanData& plan) {
  CrossingCount count;
  if (plan.between) {
    for (const CarriedSource& carried : plan.between->carried) {
      count.rows += carried.crossings.size();
      for (size_t m = 0; m < carried.pairs.size(); ++m) {
        count.arrivals += carried_pair(plan, carried, m).size();
      }
    }
  }
  return count;
}

}  // namespace weft
