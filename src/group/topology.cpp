// SPDX-License-Identifier: Apache-2.0
#include "group/topology.hpp"

#include <algorithm>
#include <array>
#include <unistd.h>

namespace weft {
namespace {

bool reach_each_other(const Reach& reach, int a, int b) {
  const auto i = static_cast<size_t>(a);
  const auto j = static_cast<size_t>(b);
  return reach[i][j] != 0 && reach[j][i] != 0;
}

}  // namespace

std::vector<std::vector<int>> domains_of(const Reach& reach) {
  std::vector<std::vector<int>> domains;
  for (int rank = 0; rank < static_cast<int>(reach.size()); ++rank) {
    const auto home = std::ranges::find_if(domains, [&](const std::vector<int>& domain) {
      return std::ranges::all_of(domain, [&](int member) {
        return reach_each_other(reach, rank, member);
      });
    });
    if (home == domains.end()) {
      domains.push_back({rank});
    } else {
      home->push_back(rank);
    }
  }
  return domains;
}

std::vector<std::vector<int>> split_domains(
    const std::vector<std::vector<int>>& domains, int ranks_per_domain, const Context& context
) {
  WEFT_CHECK_ARG(
      context,
      ranks_per_domain >= 1,
      "topology: WEFT_RANKS_PER_DOMAIN = {} is too small (at least 1)",
      ranks_per_domain
  );
  const auto size = static_cast<size_t>(ranks_per_domain);
  size_t num_ranks = 0;
  for (const std::vector<int>& domain : domains) {
    num_ranks += domain.size();
  }
  if (num_ranks < size) {
    return domains;  // a program's small group beside its large one
  }
  std::vector<std::vector<int>> parts;
  for (const std::vector<int>& domain : domains) {
    WEFT_CHECK_ARG(
        context,
        domain.size() % size == 0,
        "topology: WEFT_RANKS_PER_DOMAIN = {} does not divide a domain of {} ranks (the one of "
        "rank {})",
        ranks_per_domain,
        domain.size(),
        domain.front()
    );
    for (auto first = domain.begin(); first != domain.end(); first += ranks_per_domain) {
      parts.emplace_back(first, first + ranks_per_domain);
    }
  }
  std::ranges::sort(parts);  // by lowest member
  return parts;
}

Topology make_topology(
    std::vector<std::vector<int>> domains, std::vector<std::string> host_of, bool one_process
) {
  Topology topology;
  topology.domain_of.resize(host_of.size());
  for (size_t i = 0; i < domains.size(); ++i) {
    for (const int rank : domains[i]) {
      topology.domain_of[static_cast<size_t>(rank)] = static_cast<int>(i);
    }
  }
  topology.domains = std::move(domains);
  topology.host_of = std::move(host_of);
  topology.one_process = one_process;
  return topology;
}

Topology local_topology(int num_ranks, std::optional<int> ranks_per_domain) {
  const auto size = static_cast<size_t>(num_ranks);
  auto domains = domains_of(Reach(size, std::vector<uint8_t>(size, 1)));
  if (ranks_per_domain) {
    domains = split_domains(domains, *ranks_per_domain, {});
  }
  return make_topology(std::move(domains), std::vector<std::string>(size, this_host()), true);
}

std::string this_host() {
  std::array<char, 256> name = {};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

}  // namespace weft
