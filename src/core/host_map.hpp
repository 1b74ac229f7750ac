// SPDX-License-Identifier: Apache-2.0
// Which cores and cards of a host lie near each other, as hwloc sees it. Cards and GPUs are named
// by PCI address, "0000:17:00.0". host_map_none.cpp answers for builds without hwloc: nothing is
// known.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

class HostMap {
 public:
  // This host, read at the first call; what cannot be read is not known.
  static const HostMap& here();
  // Another, from hwloc's XML, of whose cores the process may use `usable` (empty: all). Throws
  // Error (kInvalidArgument).
  explicit HostMap(const std::string& xml, std::span<const int> usable = {});
  ~HostMap();
  HostMap(const HostMap&) = delete;
  HostMap& operator=(const HostMap&) = delete;

  // The indices of those `cards` that are nearest to `device`, ascending; without a device, of
  // those next to a core that the process may use. All of them where nothing tells them apart.
  [[nodiscard]] std::vector<size_t> nearest(
      std::string_view device, std::span<const std::string> cards
  ) const;
  // Cores nearest to `device` that the process may use, ascending; empty: it makes no difference.
  [[nodiscard]] std::vector<int> cores_near(std::string_view device) const;

 private:
  struct Topology;
  explicit HostMap(std::unique_ptr<Topology> topology);

  std::unique_ptr<Topology> topology_;  // null: nothing is known
};

// Keeps the calling thread on these cores. With no cores, or where the system refuses, nothing
// happens.
void stay_on(std::span<const int> cores);

// NUMA nodes of this host; 1 where the system does not say.
[[nodiscard]] int num_memory_nodes();

}  // namespace weft
