// SPDX-License-Identifier: Apache-2.0
// Who carries tokens between domains. A token crosses to another domain once, to its carrier there:
// the rank that has the source's place in its own domain (modulo the size of that domain, which may
// be another). The carrier hands it on to the ranks of its domain.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace weft {

class Domains {
 public:
  // As Topology::domains: every rank once, ascending in each domain; seen from `rank`.
  Domains(std::vector<std::vector<int>> domains, int rank);

  [[nodiscard]] bool has_several() const { return domains_.size() > 1; }
  [[nodiscard]] int num_domains() const { return static_cast<int>(domains_.size()); }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(domain_of_.size()); }
  [[nodiscard]] int own() const { return domain_of(rank_); }
  [[nodiscard]] int domain_of(int rank) const { return domain_of_[static_cast<size_t>(rank)]; }
  [[nodiscard]] std::span<const int> members(int domain) const {
    return domains_[static_cast<size_t>(domain)];
  }
  // Ranks of this rank's domain, itself included.
  [[nodiscard]] std::span<const int> near() const { return members(own()); }
  [[nodiscard]] bool is_near(int rank) const { return domain_of(rank) == own(); }
  // Of a rank in its domain.
  [[nodiscard]] int place_of(int rank) const { return place_of_[static_cast<size_t>(rank)]; }

  // Who puts the rows of `source` to the ranks of `domain`; `source` itself in its own.
  [[nodiscard]] int carrier_into(int domain, int source) const;
  [[nodiscard]] int carrier(int source, int to) const {
    return carrier_into(domain_of(to), source);
  }
  // Who hands on here what `source` sends to this rank, or -1 if nobody is between them.
  [[nodiscard]] int between(int source) const {
    const int by = carrier(source, rank_);
    return by == source || by == rank_ ? -1 : by;
  }
  // Sources of other domains whose tokens `near_rank` hands on in this domain, ascending.
  [[nodiscard]] std::span<const int> carried_by(int near_rank) const {
    return carried_by_[static_cast<size_t>(near_rank)];
  }
  [[nodiscard]] std::span<const int> carried() const { return carried_by(rank_); }

  // The number of the pair (source, this rank) at the source's carrier here: sources ascending,
  // each with all ranks of the domain.
  [[nodiscard]] uint32_t pair_at_carrier(int source) const;
  // Most such pairs of any rank.
  [[nodiscard]] uint32_t max_carried_pairs() const;
  // Ranks of the largest domain.
  [[nodiscard]] int max_members() const;

 private:
  std::vector<std::vector<int>> domains_;
  int rank_;
  std::vector<int> domain_of_;
  std::vector<int> place_of_;
  std::vector<std::vector<int>> carried_by_;  // [num_ranks], of this domain's ranks
};

}  // namespace weft
