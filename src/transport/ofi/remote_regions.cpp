// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/remote_regions.hpp"

#include <mutex>

namespace weft::ofi {
namespace {

// Generations count up and may wrap.
bool is_after(uint32_t generation, uint32_t other) {
  return static_cast<int32_t>(generation - other) > 0;
}

}  // namespace

std::optional<RemoteRegions::View> RemoteRegions::find(uint32_t slot) const {
  const std::shared_lock lock(mutex_);
  const auto found = entries_.find(slot);
  if (found == entries_.end() || found->second.region.generation == 0) {
    return std::nullopt;
  }
  const auto& [region, released_generation] = found->second;
  return View{
      .base = region.cookie[kBaseWord],
      .key = region.cookie[kKeyWord],
      .bytes = region.bytes,
      .is_released = !is_after(region.generation, released_generation)};
}

bool RemoteRegions::insert(const RegionRef& region) {
  if (region.generation == 0) {
    return false;
  }
  const std::unique_lock lock(mutex_);
  Entry& entry = entries_[region.slot];
  if (!is_after(region.generation, entry.released_generation)) {
    return false;
  }
  entry.region = region;
  return true;
}

void RemoteRegions::release(uint32_t slot, uint32_t generation) {
  const std::unique_lock lock(mutex_);
  uint32_t& newest = entries_[slot].released_generation;
  newest = is_after(generation, newest) ? generation : newest;
}

}  // namespace weft::ofi
