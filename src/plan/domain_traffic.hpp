// SPDX-License-Identifier: Apache-2.0
// Inter-node traffic of a plan: which tokens go to which domain, and who forwards them there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan_data.hpp"

namespace weft {

// Domains of the group, and the ranks that forward tokens between them. A token is sent to another
// domain once, to its forwarder there (`forwarder`): the rank with the source's place, modulo the
// size of the forwarder's domain, which may be another. The forwarder sends it on to the ranks of
// its domain.
class Domains {
 public:
  // `domains` as in Topology: every rank once, ascending in each domain. Seen from `rank`.
  Domains(std::vector<std::vector<int>> domains, int rank)
      : Domains(std::move(domains), rank, [](int) { return false; }) {}
  // Leaves lost ranks out, as if they had never been: they are in no domain.
  Domains(std::vector<std::vector<int>> domains, int rank, const std::function<bool(int)>& is_lost);

  [[nodiscard]] bool has_several() const { return domains_.size() > 1; }
  [[nodiscard]] int num_domains() const { return static_cast<int>(domains_.size()); }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(domain_of_.size()); }
  [[nodiscard]] int own() const { return domain_of(rank_); }
  // -1: the rank is lost.
  [[nodiscard]] int domain_of(int rank) const { return domain_of_[static_cast<size_t>(rank)]; }
  [[nodiscard]] std::span<const int> members(int domain) const {
    return domains_[static_cast<size_t>(domain)];
  }
  // Ranks of this rank's domain, itself included.
  [[nodiscard]] std::span<const int> near() const { return members(own()); }
  [[nodiscard]] bool is_near(int rank) const { return domain_of(rank) == own(); }
  // The place of a rank in its domain.
  [[nodiscard]] int place_of(int rank) const { return place_of_[static_cast<size_t>(rank)]; }

  // The rank that puts rows of `source` to ranks of `domain`: `source`, if that is its own.
  [[nodiscard]] int forwarder_into(int domain, int source) const;
  [[nodiscard]] int forwarder(int source, int to) const {
    return forwarder_into(domain_of(to), source);
  }
  // The rank that forwards what `source` sends to this rank; -1 if none does.
  [[nodiscard]] int between(int source) const {
    const int by = forwarder(source, rank_);
    return by == source || by == rank_ ? -1 : by;
  }
  // Sources of other domains whose tokens `near_rank` forwards in this domain, ascending.
  [[nodiscard]] std::span<const int> forwarded_by(int near_rank) const {
    return forwarded_by_[static_cast<size_t>(near_rank)];
  }
  [[nodiscard]] std::span<const int> forwarded() const { return forwarded_by(rank_); }

  // The number of the pair (source, this rank) at the source's forwarder here: sources ascend, each
  // with all ranks of the domain.
  [[nodiscard]] uint32_t pair_at_forwarder(int source) const;
  // Most pairs that a rank forwards.
  [[nodiscard]] uint32_t max_forwarded_pairs() const;
  // Ranks of the largest domain.
  [[nodiscard]] int max_members() const;

 private:
  std::vector<std::vector<int>> domains_;
  int rank_;
  std::vector<int> domain_of_;
  std::vector<int> place_of_;
  std::vector<std::vector<int>> forwarded_by_;  // [num_ranks], of this domain's ranks
};

// The inter-node tokens of one rank to one domain: those with an arrival in any of the pairs
// (source, member of that domain), ascending, each once. An empty pair may be null. The source and
// its forwarder derive the same list.
[[nodiscard]] std::vector<int32_t> crossing_tokens(std::span<const Arrivals* const> pairs);

// Returns crossing_tokens() with maps from arrivals and back.
[[nodiscard]] Crossings find_crossings(std::span<const Arrivals* const> pairs);

// The source of another domain whose tokens this rank forwards.
struct ForwardedSource {
  int source = 0;
  // [members of this domain] the pairs (source, member); this rank's own is in PlanData::received.
  std::vector<Arrivals> pairs;
  Crossings crossings;
  std::vector<int64_t> first_row;  // [members] of the pair in the area to that member
};

// A domain that a token goes to, and the token's number there.
struct TokenPart {
  static constexpr int32_t kHere = -1;
  int32_t domain = 0;
  int32_t index = kHere;  // in that domain's inter-node tokens; kHere: this rank's own domain
  friend bool operator==(const TokenPart&, const TokenPart&) = default;
};

// Traffic that a plan of a group of several domains has in addition to its pairs: which of this
// rank's tokens go to which domain, and what it forwards for ranks of other domains.
//
// Rows pass between two ranks of a domain in one sequence, an area: the pair of the two, then the
// pairs (source, receiver) that the sender forwards, sources ascending. Both ends know all sizes.
struct DomainTraffic {
  std::shared_ptr<const Domains> domains;
  std::vector<std::vector<int32_t>> sent;  // [num_domains] inter-node tokens, ascending; own: none
  std::vector<int32_t> token_begin;        // [num_tokens + 1]
  std::vector<TokenPart> token_parts;      // by token, ascending domain: the order of combine's sum
  std::vector<ForwardedSource> forwarded;  // ascending source
  std::vector<int64_t> rows_to;    // [num_ranks] of the area to each rank of the domain, else 0
  std::vector<int64_t> rows_from;  // [num_ranks] of the area from each rank of the domain, else 0
  // [num_ranks] by source, of the pair (source, this rank) in the area of its sender.
  std::vector<int64_t> first_row;

  [[nodiscard]] std::span<const TokenPart> parts_of(size_t token) const {
    const auto begin = static_cast<size_t>(token_begin[token]);
    const auto end = static_cast<size_t>(token_begin[token + 1]);
    return std::span(token_parts).subspan(begin, end - begin);
  }
  // Null if this rank does not forward for `source`.
  [[nodiscard]] const ForwardedSource* find_forwarded(int source) const;
};

// Makes traffic of `forwarded`, by source of domains.forwarded(), then member.
[[nodiscard]] std::shared_ptr<const DomainTraffic> make_domain_traffic(
    const PlanData& plan,
    std::shared_ptr<const Domains> domains,
    std::vector<std::vector<Arrivals>> forwarded
);

// True if no domain border lies between this rank and `peer`.
[[nodiscard]] inline bool is_near(const PlanData& plan, size_t peer) {
  return !plan.between || plan.between->domains->is_near(static_cast<int>(peer));
}

// The pair (source that this rank forwards for, member), wherever it is kept.
[[nodiscard]] inline const Arrivals& forwarded_pair(
    const PlanData& plan, const ForwardedSource& forwarded, size_t member
) {
  const auto own = static_cast<size_t>(plan.between->domains->place_of(plan.shape.rank));
  return member == own ? plan.received[static_cast<size_t>(forwarded.source)]
                       : forwarded.pairs[member];
}

// Rows of the area that this rank fills at `peer` in dispatch, and that `peer` fills here.
[[nodiscard]] int64_t rows_to(const PlanData& plan, size_t peer);
[[nodiscard]] int64_t rows_from(const PlanData& plan, size_t peer);

// Inter-node tokens of `source` to this rank, and of this rank to `peer`.
[[nodiscard]] int64_t crossings_from(const PlanData& plan, size_t source);
[[nodiscard]] int64_t crossings_to(const PlanData& plan, size_t peer);

// True if forwarders add up a token's rows of their domain: with SumOrder::kTopk rows come straight
// from their ranks.
[[nodiscard]] inline bool forwards_sums(const PlanData& plan) {
  return plan.shape.options.order == SumOrder::kRank;
}
// Rows of the area that `peer` fills here in combine: as in dispatch, or a place for each route.
[[nodiscard]] inline int64_t returned_from(const PlanData& plan, size_t peer) {
  return forwards_sums(plan) ? rows_to(plan, peer) : plan.sent[peer].num_routes();
}
// Sums of inter-node tokens that `peer` returns.
[[nodiscard]] inline int64_t crossing_sums_from(const PlanData& plan, size_t peer) {
  return forwards_sums(plan) ? crossings_to(plan, peer) : 0;
}

// Rows that went to other domains, or came from there, and the arrivals they stand for.
struct CrossingCount {
  int64_t rows = 0;
  int64_t arrivals = 0;
};
[[nodiscard]] CrossingCount count_sent(const PlanData& plan);
[[nodiscard]] CrossingCount count_forwarded(const PlanData& plan);
// Counts what this rank returns to other domains in combine.
[[nodiscard]] CrossingCount count_returned(const PlanData& plan);

}  // namespace weft
