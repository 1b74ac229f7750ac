// SPDX-License-Identifier: Apache-2.0
#include "plan/domains.hpp"

#include <algorithm>
#include <map>

#include "core/check.hpp"

namespace weft {

Domains::Domains(std::vector<std::vector<int>> domains, int rank)
    : domains_(std::move(domains)), rank_(rank) {
  size_t num_ranks = 0;
  for (const std::vector<int>& members : domains_) {
    num_ranks += members.size();
  }
  domain_of_.resize(num_ranks);
  place_of_.resize(num_ranks);
  carried_by_.resize(num_ranks);
  for (size_t d = 0; d < domains_.size(); ++d) {
    for (size_t place = 0; place < domains_[d].size(); ++place) {
      const auto member = static_cast<size_t>(domains_[d][place]);
      WEFT_ASSERT(member < num_ranks);
      domain_of_[member] = static_cast<int>(d);
      place_of_[member] = static_cast<int>(place);
    }
  }
  for (int source = 0; source < static_cast<int>(num_ranks); ++source) {
    if (!is_near(source)) {
      carried_by_[static_cast<size_t>(carrier(source, rank_))].push_back(source);
    }
  }
}

int Domains::carrier_into(int domain, int source) const {
  if (domain == domain_of(source)) {
    return source;
  }
  const std::span<const int> there = members(domain);
  return there[static_cast<size_t>(place_of(source)) % there.size()];
}

uint32_t Domains::pair_at_carrier(int source) const {
  const std::span<const int> sources = carried_by(carrier(source, rank_));
  const auto index = std::lower_bound(sources.begin(), sources.end(), source) - sources.begin();
  return static_cast<uint32_t>(index) * static_cast<uint32_t>(near().size()) +
         static_cast<uint32_t>(place_of(rank_));
}

// The first rank of a domain carries at least as much as each other one there. Domains are many,
// their sizes few.
uint32_t Domains::max_carried_pairs() const {
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
  size_t most = 0;
  for (const std::vector<int>& members : domains_) {
    most = std::max(most, members.size());
  }
  return static_cast<int>(most);
}

}  // namespace weft
