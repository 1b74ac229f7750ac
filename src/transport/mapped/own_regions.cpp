// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/own_regions.hpp"

#include <algorithm>
#include <utility>

namespace weft {

OwnRegions::~OwnRegions() {
  for (const auto& [slot, memory] : memories_) {
    signals_.set_generation(slot, 0);
  }
}

uint32_t OwnRegions::take_slot(const Context& context) {
  if (!free_slots_.empty()) {
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    return slot;
  }
  WEFT_CHECK(
      context,
      last_generation_.size() < kMaxRegions,
      ErrorCode::kOutOfMemory,
      "allocate: all {} regions are in use",
      kMaxRegions
  );
  last_generation_.push_back(0);
  return static_cast<uint32_t>(last_generation_.size() - 1);
}

Region OwnRegions::add(Memory memory, uint64_t bytes, const Context& context) {
  const uint32_t slot = take_slot(context);
  uint32_t& generation = last_generation_[slot];
  generation = std::max<uint32_t>(generation + 1, 1);  // 0 means none, after 2^32 reuses too
  Region region = {
      .data = memory.data, .ref = {.slot = slot, .generation = generation, .bytes = bytes}};
  std::copy(memory.cookie.begin(), memory.cookie.end(), region.ref.cookie);
  memories_[slot] = std::move(memory);
  signals_.set_generation(slot, generation);
  return region;
}

void OwnRegions::remove(const RegionRef& region, const Context& context) {
  const auto found = memories_.find(region.slot);
  WEFT_CHECK(
      context,
      found != memories_.end() && signals_.generation(region.slot) == region.generation,
      ErrorCode::kTransport,
      "release: region {} generation {} is not allocated",
      region.slot,
      region.generation
  );
  signals_.set_generation(region.slot, 0);
  memories_.erase(found);
  free_slots_.push_back(region.slot);
}

}  // namespace weft
