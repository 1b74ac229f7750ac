// SPDX-License-Identifier: Apache-2.0
// Map of a host: which cores and cards lie near each other, as Linux tells below /sys. Cards and
// GPUs are named by PCI address, "0000:17:00.0".
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

class HostMap {
 public:
  // Returns the map of this host, with the cores that the process may use at the first call.
  static const HostMap& here();
  // Maps a host that is described below `sys` as Linux does below /sys; the process may use its
  // cores `usable`, ascending (empty: all). What cannot be read there is not known.
  explicit HostMap(std::filesystem::path sys, std::vector<int> usable = {});

  // Returns the indices of the `cards` nearest to `device`, ascending; without a device, of those
  // next to a core that the process may use. All of them where nothing tells them apart.
  [[nodiscard]] std::vector<size_t> nearest(
      std::string_view device, std::span<const std::string> cards
  ) const;
  // Returns the cores nearest to `device` that the process may use, ascending; empty: any will do.
  [[nodiscard]] std::vector<int> cores_near(std::string_view device) const;

 private:
  struct Device {
    std::vector<std::string> way;  // from the host's bridge by the switches' to the device
    std::vector<int> cores;        // next to it, ascending
  };
  using Ring = std::function<bool(const Device&)>;
  // Returns the rings of cards around `address`, from the narrowest to the widest: behind the same
  // switch, the same bridge; on the same part of the machine; any that is known.
  [[nodiscard]] std::vector<Ring> rings_around(std::string_view address) const;
  [[nodiscard]] std::optional<Device> find(std::string_view address) const;
  // Returns the cores that the file names, as in "0-3,8"; nothing without it.
  [[nodiscard]] std::vector<int> cores_in(const std::filesystem::path& file) const;
  // Returns all cores of the package in which these are; nothing if that is not known.
  [[nodiscard]] std::vector<int> package_of(const std::vector<int>& cores) const;

  std::filesystem::path sys_;
  std::vector<int> usable_;
};

// Keeps the calling thread on these cores. With no cores, or where the system refuses, nothing
// happens.
void stay_on(std::span<const int> cores);

// Returns the number of NUMA nodes of this host; 1 where the system does not say.
[[nodiscard]] int num_memory_nodes();

}  // namespace weft
