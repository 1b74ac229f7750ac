// SPDX-License-Identifier: Apache-2.0
#include "core/host_map.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sched.h>
#include <sstream>
#include <utility>

namespace weft {
namespace {

using Cores = std::vector<int>;

Cores cores_of_process() {
  cpu_set_t set;
  Cores cores;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(static_cast<size_t>(core), &set)) {
        cores.push_back(core);
      }
    }
  }
  return cores;
}

Cores common(const Cores& one, const Cores& other) {
  Cores both;
  std::ranges::set_intersection(one, other, std::back_inserter(both));
  return both;
}

}  // namespace

HostMap::HostMap(std::filesystem::path sys, std::vector<int> usable)
    : sys_(std::move(sys)), usable_(std::move(usable)) {
  if (usable_.empty()) {
    usable_ = cores_in("devices/system/cpu/online");
  }
}

const HostMap& HostMap::here() {
  static const HostMap map("/sys", cores_of_process());
  return map;
}

std::vector<int> HostMap::cores_in(const std::filesystem::path& file) const {
  std::ifstream in(sys_ / file);
  Cores cores;
  for (std::string piece; std::getline(in, piece, ',');) {
    std::istringstream text(piece);
    int first = 0;
    if (text >> first) {
      int last = first;
      if (text.get() == '-') {
        text >> last;
      }
      for (int core = first; core <= last && core < CPU_SETSIZE; ++core) {
        cores.push_back(core);
      }
    }
  }
  return cores;
}

std::optional<HostMap::Device> HostMap::find(std::string_view address) const {
  std::string name(address);
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::error_code missing;
  const auto path = std::filesystem::canonical(sys_ / "bus/pci/devices" / name, missing);
  if (name.empty() || missing) {
    return std::nullopt;
  }
  Device device;
  for (const std::filesystem::path& part : path) {
    if (!device.way.empty() || part.string().starts_with("pci")) {
      device.way.push_back(part);
    }
  }
  device.cores = cores_in(path / "local_cpulist");
  if (device.cores.empty()) {
    device.cores = usable_;
  }
  return device;
}

std::vector<int> HostMap::package_of(const std::vector<int>& cores) const {
  if (cores.empty()) {
    return {};
  }
  const std::string core = "cpu" + std::to_string(cores.front());
  return cores_in(
      std::filesystem::path("devices/system/cpu") / core / "topology/core_siblings_list"
  );
}

std::vector<HostMap::Ring> HostMap::rings_around(std::string_view address) const {
  if (address.empty()) {
    return {[this](const Device& card) { return !common(card.cores, usable_).empty(); }};
  }
  const std::optional<Device> device = find(address);
  if (!device) {
    return {};
  }
  std::vector<Ring> rings;
  for (size_t shared = device->way.size(); shared > 0; --shared) {
    rings.emplace_back([way = device->way, shared](const Device& card) {
      return std::ranges::mismatch(way, card.way).in1 - way.begin() >=
             static_cast<std::ptrdiff_t>(shared);
    });
  }
  for (const Cores& part : {device->cores, package_of(device->cores)}) {
    rings.emplace_back([part](const Device& card) {
      return std::ranges::includes(part, card.cores);
    });
  }
  rings.emplace_back([](const Device& /*card*/) { return true; });
  return rings;
}

std::vector<size_t> HostMap::nearest(std::string_view device, std::span<const std::string> cards)
    const {
  std::vector<std::optional<Device>> known;
  std::ranges::transform(cards, std::back_inserter(known), [&](const std::string& card) {
    return find(card);
  });
  for (const Ring& is_near : rings_around(device)) {
    std::vector<size_t> near;
    for (size_t i = 0; i < known.size(); ++i) {
      if (known[i] && is_near(*known[i])) {
        near.push_back(i);
      }
    }
    if (!near.empty()) {
      return near;
    }
  }
  std::vector<size_t> all(cards.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

std::vector<int> HostMap::cores_near(std::string_view device) const {
  const std::optional<Device> found = find(device);
  if (!found) {
    return {};
  }
  Cores near = common(found->cores, usable_);
  return near == usable_ ? Cores() : near;
}

}  // namespace weft
