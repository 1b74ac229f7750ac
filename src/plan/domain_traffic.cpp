// SPDX-License-Identifier: Apache-2.0
#include "plan/domain_traffic.hpp"

#include <algorithm>
#include <map>

#include "core/check.hpp"

namespace weft {

Domains::Domains(
    std::vector<std::vector<int>> domains, int rank, const std::function<bool(int)>& is_lost
)
    : domains_(std::move(domains)), rank_(rank) {
  size_t num_ranks = 0;
  for (std::vector<int>& members : domains_) {
    num_ranks += members.size();
    std::erase_if(members, is_lost);
  }
  std::erase_if(domains_, [](const std::vector<int>& members) { return members.empty(); });
  domain_of_.assign(num_ranks, -1);
  place_of_.resize(num_ranks);
  forwarded_by_.resize(num_ranks);
  for (size_t d = 0; d < domains_.size(); ++d) {
    for (size_t place = 0; place < domains_[d].size(); ++place) {
      const auto member = static_cast<size_t>(domains_[d][place]);
      WEFT_ASSERT(member < num_ranks);
      domain_of_[member] = static_cast<int>(d);
      place_of_[member] = static_cast<int>(place);
    }
  }
  for (int source = 0; source < static_cast<int>(num_ranks); ++source) {
    if (domain_of(source) >= 0 && !is_near(source)) {
      forwarded_by_[static_cast<size_t>(forwarder(source, rank_))].push_back(source);
    }
  }
}

int Domains::forwarder_into(int domain, int source) const {
  if (domain == domain_of(source)) {
    return source;
  }
  const std::span<const int> there = members(domain);
  return there[static_cast<size_t>(place_of(source)) % there.size()];
}

uint32_t Domains::pair_at_forwarder(int source) const {
  const std::span<const int> sources = forwarded_by(forwarder(source, rank_));
  const auto index = std::lower_bound(sources.begin(), sources.end(), source) - sources.begin();
  return static_cast<uint32_t>(index) * static_cast<uint32_t>(near().size()) +
         static_cast<uint32_t>(place_of(rank_));
}

// Counts by size for a domain's first rank, which forwards at least as much as others there:
// domains are many, sizes few.
uint32_t Domains::max_forwarded_pairs() const {
  std::map<size_t, size_t> num_of;  // domains by size
  for (const std::vector<int>& members : domains_) {
    ++num_of[members.size()];
  }
  size_t most = 0;
  for (const auto& [here, num_here] : num_of) {
    size_t num_sources = 0;
    for (const auto& [there, num_there] : num_of) {
      const size_t num_others = num_there - (there == here ? 1 : 0);
      num_sources += num_others * ((there + here - 1) / here);
    }
    most = std::max(most, num_sources * here);
  }
  return static_cast<uint32_t>(most);
}

int Domains::max_members() const {
  const auto& largest = std::ranges::max(domains_, {}, &std::vector<int>::size);
  return static_cast<int>(largest.size());
}

namespace {

// Marks, by token, whether any pair has it; the list ends with the largest token.
std::vector<int32_t> mark_tokens(std::span<const Arrivals* const> pairs) {
  std::vector<int32_t> is_there;
  for (const Arrivals* pair : pairs) {
    if (pair != nullptr && !pair->token.empty()) {
      is_there.resize(std::max(is_there.size(), static_cast<size_t>(pair->token.back()) + 1));
      for (const int32_t token : pair->token) {
        is_there[static_cast<size_t>(token)] = 1;
      }
    }
  }
  return is_there;
}

// Lists the marked tokens, ascending; each one's number takes its mark's place. There is no branch,
// since which tokens are there cannot be predicted.
std::vector<int32_t> number_tokens(std::span<int32_t> marks) {
  std::vector<int32_t> tokens(marks.size());
  size_t next = 0;
  for (size_t token = 0; token < marks.size(); ++token) {
    const auto is_there = static_cast<size_t>(marks[token]);
    marks[token] = static_cast<int32_t>(next);
    tokens[next] = static_cast<int32_t>(token);
    next += is_there;
  }
  tokens.resize(next);
  return tokens;
}

}  // namespace

std::vector<int32_t> crossing_tokens(std::span<const Arrivals* const> pairs) {
  std::vector<int32_t> marks = mark_tokens(pairs);
  return number_tokens(marks);
}

Crossings find_crossings(std::span<const Arrivals* const> pairs) {
  const size_t members = pairs.size();
  Crossings found;
  found.num_members = members;
  found.crossing.resize(members);
  std::vector<int32_t> number = mark_tokens(pairs);
  found.token = number_tokens(number);
  found.arrival.assign(found.token.size() * members, -1);
  for (size_t member = 0; member < members; ++member) {
    if (pairs[member] == nullptr) {
      continue;
    }
    const std::vector<int32_t>& tokens = pairs[member]->token;
    std::vector<int32_t>& crossing = found.crossing[member];
    crossing.resize(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      crossing[i] = number[static_cast<size_t>(tokens[i])];
      found.arrival[static_cast<size_t>(crossing[i]) * members + member] = static_cast<int32_t>(i);
    }
  }
  return found;
}

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

void link_token_parts(const PlanData& plan, DomainTraffic& traffic) {
  const Domains& domains = *traffic.domains;
  const auto own = static_cast<size_t>(domains.own());
  std::vector<std::vector<int32_t>> tokens = traffic.sent;
  tokens[own] = crossing_tokens(pairs_into(domains.near(), plan.sent));
  const std::vector<std::span<const int32_t>> lists(tokens.begin(), tokens.end());
  group_by_token<TokenPart>(
      lists,
      plan.shape.num_tokens,
      traffic.token_begin,
      traffic.token_parts,
      [own](size_t domain, size_t i) {
        const auto index = domain == own ? TokenPart::kHere : static_cast<int32_t>(i);
        return TokenPart{static_cast<int32_t>(domain), index};
      }
  );
}

void add_forwarded(
    const PlanData& plan, DomainTraffic& traffic, std::vector<std::vector<Arrivals>> forwarded
) {
  const Domains& domains = *traffic.domains;
  const std::span<const int> near = domains.near();
  for (const int member : near) {
    if (member != plan.shape.rank) {
      const auto m = static_cast<size_t>(member);
      traffic.rows_to[m] = plan.sent[m].size();
    }
  }
  WEFT_ASSERT(forwarded.size() == domains.forwarded().size());
  for (size_t i = 0; i < forwarded.size(); ++i) {
    ForwardedSource one = {
        .source = domains.forwarded()[i],
        .pairs = std::move(forwarded[i]),
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
    traffic.forwarded.push_back(std::move(one));
  }
}

// Adds the areas that add_forwarded() of the peers makes, seen from their other end.
void add_received_areas(const PlanData& plan, DomainTraffic& traffic) {
  const Domains& domains = *traffic.domains;
  for (const int member : domains.near()) {
    if (member == plan.shape.rank) {
      continue;
    }
    const auto m = static_cast<size_t>(member);
    traffic.rows_from[m] = plan.received[m].size();
    for (const int source : domains.forwarded_by(member)) {
      const auto s = static_cast<size_t>(source);
      traffic.first_row[s] = traffic.rows_from[m];
      traffic.rows_from[m] += plan.received[s].size();
    }
  }
}

}  // namespace

const ForwardedSource* DomainTraffic::find_forwarded(int source) const {
  const auto found = std::ranges::lower_bound(forwarded, source, {}, &ForwardedSource::source);
  return found == forwarded.end() || found->source != source ? nullptr : &*found;
}

std::shared_ptr<const DomainTraffic> make_domain_traffic(
    const PlanData& plan,
    std::shared_ptr<const Domains> domains,
    std::vector<std::vector<Arrivals>> forwarded
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
  add_forwarded(plan, *traffic, std::move(forwarded));
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
  const ForwardedSource* forwarded =
      plan.between ? plan.between->find_forwarded(static_cast<int>(source)) : nullptr;
  return forwarded == nullptr ? 0 : forwarded->crossings.size();
}

int64_t crossings_to(const PlanData& plan, size_t peer) {
  if (!plan.between) {
    return 0;
  }
  const Domains& domains = *plan.between->domains;
  const int domain = domains.domain_of(static_cast<int>(peer));
  if (domain < 0) {
    return 0;
  }
  const bool is_forwarder =
      domains.forwarder_into(domain, plan.shape.rank) == static_cast<int>(peer);
  const std::vector<int32_t>& tokens = plan.between->sent[static_cast<size_t>(domain)];
  return is_forwarder ? static_cast<int64_t>(tokens.size()) : 0;
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

CrossingCount count_forwarded(const PlanData& plan) {
  CrossingCount count;
  if (plan.between) {
    for (const ForwardedSource& forwarded : plan.between->forwarded) {
      count.rows += forwarded.crossings.size();
      for (size_t m = 0; m < forwarded.pairs.size(); ++m) {
        count.arrivals += forwarded_pair(plan, forwarded, m).size();
      }
    }
  }
  return count;
}

CrossingCount count_returned(const PlanData& plan) {
  if (forwards_sums(plan)) {
    return count_forwarded(plan);
  }
  CrossingCount count;
  for (size_t source = 0; source < plan.received.size(); ++source) {
    if (!is_near(plan, source)) {
      count.rows += num_returned_rows(plan.shape, plan.received[source]);
      count.arrivals += plan.received[source].size();
    }
  }
  return count;
}

}  // namespace weft
