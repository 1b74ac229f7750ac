// SPDX-License-Identifier: Apache-2.0
#include "core/host_map.hpp"

#include <hwloc.h>
#include <numeric>
#include <utility>

#include "core/check.hpp"

namespace weft {
namespace {

struct FreeSet {
  void operator()(hwloc_bitmap_t set) const { hwloc_bitmap_free(set); }
};
using CoreSet = std::unique_ptr<hwloc_bitmap_s, FreeSet>;

struct FreeTopology {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Handle = std::unique_ptr<hwloc_topology, FreeTopology>;

// With its cards, as the kernel lists them: asking the drivers of GPUs would wake them, which takes
// long, and libpciaccess keeps memory.
Handle new_handle() {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) {
    return nullptr;
  }
  Handle handle(topology);
  for (const char* component : {"pci", "cuda", "nvml", "opencl", "rsmi", "levelzero", "gl"}) {
    hwloc_topology_set_components(topology, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, component);
  }
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
  return handle;
}

bool is_within(hwloc_obj_t object, hwloc_obj_t ancestor) {
  while (object != nullptr && object != ancestor) {
    object = object->parent;
  }
  return object != nullptr;
}

std::vector<size_t> all_of(size_t count) {
  std::vector<size_t> indices(count);
  std::iota(indices.begin(), indices.end(), size_t{0});
  return indices;
}

}  // namespace

struct HostMap::Topology {
  Handle handle;
  CoreSet usable;

  [[nodiscard]] hwloc_obj_t find(std::string_view address) const {
    return address.empty()
               ? nullptr
               : hwloc_get_pcidev_by_busidstring(handle.get(), std::string(address).c_str());
  }
  // What beside the device's cores this process may use.
  [[nodiscard]] CoreSet cores_of(hwloc_obj_t device) const {
    CoreSet cores(hwloc_bitmap_dup(usable.get()));
    const hwloc_obj_t owner = hwloc_get_non_io_ancestor_obj(handle.get(), device);
    hwloc_bitmap_and(cores.get(), cores.get(), owner->cpuset);
    return cores;
  }
};

HostMap::HostMap(std::unique_ptr<Topology> topology) : topology_(std::move(topology)) {}

HostMap::~HostMap() = default;

HostMap::HostMap(const std::string& xml, std::span<const int> usable)
    : topology_(std::make_unique<Topology>()) {
  topology_->handle = new_handle();
  const auto length = static_cast<int>(xml.size()) + 1;  // with the zero behind
  const hwloc_topology_t topology = topology_->handle.get();
  WEFT_CHECK_ARG(
      Context{},
      topology != nullptr && hwloc_topology_set_xmlbuffer(topology, xml.c_str(), length) == 0 &&
          hwloc_topology_load(topology) == 0,
      "host map: {} B of XML describe no topology",
      xml.size()
  );
  topology_->usable.reset(hwloc_bitmap_dup(hwloc_topology_get_topology_cpuset(topology)));
  if (!usable.empty()) {
    hwloc_bitmap_zero(topology_->usable.get());
    for (const int core : usable) {
      hwloc_bitmap_set(topology_->usable.get(), static_cast<unsigned>(core));
    }
  }
}

const HostMap& HostMap::here() {
  static const HostMap map([]() -> std::unique_ptr<Topology> {
    auto found = std::make_unique<Topology>();
    found->handle = new_handle();
    if (found->handle == nullptr || hwloc_topology_load(found->handle.get()) != 0) {
      return nullptr;
    }
    const hwloc_topology_t topology = found->handle.get();
    found->usable.reset(hwloc_bitmap_dup(hwloc_topology_get_topology_cpuset(topology)));
    const CoreSet bound(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(topology, bound.get(), HWLOC_CPUBIND_PROCESS) == 0) {
      hwloc_bitmap_and(found->usable.get(), found->usable.get(), bound.get());
    }
    return found;
  }());
  return map;
}

std::vector<size_t> HostMap::nearest(std::string_view device, std::span<const std::string> cards)
    const {
  if (topology_ == nullptr) {
    return all_of(cards.size());
  }
  std::vector<hwloc_obj_t> objects;
  for (const std::string& card : cards) {
    objects.push_back(topology_->find(card));
  }
  std::vector<size_t> near;
  const auto collect = [&](const auto& is_near) {
    for (size_t i = 0; i < objects.size(); ++i) {
      if (objects[i] != nullptr && is_near(objects[i])) {
        near.push_back(i);
      }
    }
  };
  if (device.empty()) {
    collect([&](hwloc_obj_t card) {
      return hwloc_bitmap_iszero(topology_->cores_of(card).get()) == 0;
    });
  }
  // From the device up: its switch, its bridge, its part of the machine, the machine.
  for (auto from = topology_->find(device); from != nullptr && near.empty(); from = from->parent) {
    collect([&](hwloc_obj_t card) { return is_within(card, from); });
  }
  return near.empty() ? all_of(cards.size()) : near;
}

std::vector<int> HostMap::cores_near(std::string_view device) const {
  std::vector<int> cores;
  const hwloc_obj_t object = topology_ == nullptr ? nullptr : topology_->find(device);
  if (object == nullptr) {
    return cores;
  }
  const CoreSet near = topology_->cores_of(object);
  if (hwloc_bitmap_isequal(near.get(), topology_->usable.get()) == 0) {
    for (int core = hwloc_bitmap_first(near.get()); core >= 0;
         core = hwloc_bitmap_next(near.get(), core)) {
      cores.push_back(core);
    }
  }
  return cores;
}

}  // namespace weft
