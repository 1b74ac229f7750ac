// SPDX-License-Identifier: Apache-2.0
// Finds which ranks share memory. What is measured travels once; the rest is pure, so that every
// rank derives the same.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "group/control_plane.hpp"

namespace weft {

// reach[a][b] != 0: rank a mapped rank b's memory. Square.
using Reach = std::vector<std::vector<uint8_t>>;

// Returns sets of ranks that all reach each other, both ways: each rank joins the first domain, by
// lowest member, all of whose ranks it reaches so.
[[nodiscard]] std::vector<std::vector<int>> domains_of(const Reach& reach);

// Cuts each domain into runs of `ranks_per_domain`; a group of fewer ranks stays as it is. Throws
// Error (kInvalidArgument) if `ranks_per_domain` does not divide a domain's size.
[[nodiscard]] std::vector<std::vector<int>> split_domains(
    const std::vector<std::vector<int>>& domains, int ranks_per_domain, const Context& context
);

[[nodiscard]] Topology make_topology(
    std::vector<std::vector<int>> domains, std::vector<std::string> host_of, bool one_process
);

// Returns the topology of ranks that are threads of this process: nothing is measured.
[[nodiscard]] Topology local_topology(int num_ranks, std::optional<int> ranks_per_domain);

using RanksPerDomain = std::function<std::optional<int>()>;

// Collective. Maps every other rank's probe and gathers which ranks could. What
// `read_ranks_per_domain` throws on one rank is thrown on all.
[[nodiscard]] Topology probe_topology(
    const AllGather& all_gather, const RanksPerDomain& read_ranks_per_domain, const Context& context
);

[[nodiscard]] std::string this_host();

// Place where a pid has a meaning: a boot of a machine, a pid namespace. Trivially copyable.
struct ProcessPlace {
  std::array<char, 40> boot_id = {};
  uint64_t pid_namespace = 0;
  int64_t pid = 0;
  friend bool operator==(const ProcessPlace&, const ProcessPlace&) = default;
  // Returns whether a pid means the same there.
  [[nodiscard]] bool shares_pids(const ProcessPlace& other) const {
    return boot_id == other.boot_id && pid_namespace == other.pid_namespace;
  }
};
[[nodiscard]] ProcessPlace this_place();

}  // namespace weft
