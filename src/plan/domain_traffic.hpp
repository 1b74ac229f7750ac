// SPDX-License-Identifier: Apache-2.0
// What a plan of a group of several domains knows beside its pairs: which of this rank's tokens
// cross to which domain, and what it hands on for the ranks that it carries.
//
// Rows pass between two ranks of a domain in one sequence, an area: the pair of the two, then the
// pairs (source, receiver) that the sender carries, sources ascending. Both ends know all sizes.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "plan/domains.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// The source of another domain whose tokens this rank hands on.
struct CarriedSource {
  int source = 0;
  // [members of this domain] the pairs (source, member); this rank's own is in PlanData::received.
  std::vector<Arrivals> pairs;
  Crossings crossings;
  std::vector<int64_t> first_row;  // [members] of the pair in the area to that member
};

// Where a token goes, by domain.
struct TokenPart {
  static constexpr int32_t kHere = -1;
  int32_t domain = 0;
  int32_t index = kHere;  // in that domain's list of crossing tokens; kHere: this rank's own domain
  friend bool operator==(const TokenPart&, const TokenPart&) = default;
};

struct DomainTraffic {
  std::shared_ptr<const Domains> domains;
  std::vector<std::vector<int32_t>> sent;  // [num_domains] tokens that cross, ascending; own: none
  std::vector<int32_t> token_begin;        // [num_tokens + 1]
  std::vector<TokenPart> token_parts;      // by token, ascending domain: the order of combine's sum
  std::vector<CarriedSource> carried;      // ascending source
  std::vector<int64_t> rows_to;    // [num_ranks] of the area to each rank of the domain, else 0
  std::vector<int64_t> rows_from;  // [num_ranks] of the area from each rank of the domain, else 0
  // [num_ranks] by source, of the pair (source, this rank) in the area of whoever puts it here.
  std::vector<int64_t> first_row;

  [[nodiscard]] std::span<const TokenPart> parts_of(size_t token) const {
    const auto begin = static_cast<size_t>(token_begin[token]);
    const auto end = static_cast<size_t>(token_begin[token + 1]);
    return std::span(token_parts).subspan(begin, end - begin);
  }
  // Null if this rank does not carry `source`.
  [[nodiscard]] const CarriedSource* find_carried(int source) const;
};

// `carried`: by source of domains.carried(), then member; taken over.
[[nodiscard]] std::shared_ptr<const DomainTraffic> make_domain_traffic(
    const PlanData& plan,
    std::shared_ptr<const Domains> domains,
    std::vector<std::vector<Arrivals>> carried
);

// No other domain lies between this rank and `peer`.
[[nodiscard]] inline bool is_near(const PlanData& plan, size_t peer) {
  return !plan.between || plan.between->domains->is_near(static_cast<int>(peer));
}

// The pair (carried source, member), wherever it is kept.
[[nodiscard]] inline const Arrivals& carried_pair(
    const PlanData& plan, const CarriedSource& carried, size_t member
) {
  const auto own = static_cast<size_t>(plan.between->domains->place_of(plan.shape.rank));
  return member == own ? plan.received[static_cast<size_t>(carried.source)] : carried.pairs[member];
}

// Rows of the area that this rank fills at `peer` in dispatch, and that `peer` fills here.
[[nodiscard]] int64_t rows_to(const PlanData& plan, size_t peer);
[[nodiscard]] int64_t rows_from(const PlanData& plan, size_t peer);

// Tokens of `source` that cross to this rank, and of this rank that cross to `peer`.
[[nodiscard]] int64_t crossings_from(const PlanData& plan, size_t source);
[[nodiscard]] int64_t crossings_to(const PlanData& plan, size_t peer);

// Rows that crossed to other domains, or came from there, and the arrivals they stand for.
struct CrossingCount {
  int64_t rows = 0;
  int64_t arrivals = 0;
};
[[nodiscard]] CrossingCount count_sent(const PlanData& plan);
[[nodiscard]] CrossingCount count_carried(const PlanData& plan);

}  // namespace weft
