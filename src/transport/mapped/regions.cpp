// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/regions.hpp"

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

RegionTable::Entry* RegionTable::entry(uint32_t slot) const {
  if (slot >= kMaxRegions) {
    return nullptr;
  }
  Page* page = pages_[slot / kPageSlots].load(std::memory_order_acquire);
  return page == nullptr ? nullptr : &page->entries[slot % kPageSlots];
}

RegionTable::View RegionTable::find(uint32_t slot) const {
  const Entry* found = entry(slot);
  if (found == nullptr) {
    return {};
  }
  // Pairs with the release in insert(): a generation seen means data and bytes seen.
  const uint32_t generation = found->generation.load(std::memory_order_acquire);
  if (generation == 0) {
    return {};
  }
  return {
      .data = found->data.load(std::memory_order_relaxed),
      .bytes = found->bytes.load(std::memory_order_relaxed),
      .generation = generation};
}

void RegionTable::insert(uint32_t slot, uint32_t generation, Memory memory) {
  erase(slot);
  const uint32_t page_idx = slot / kPageSlots;
  if (page_owners_[page_idx] == nullptr) {
    page_owners_[page_idx] = std::make_unique<Page>();
    pages_[page_idx].store(page_owners_[page_idx].get(), std::memory_order_release);
  }
  Entry& place = *entry(slot);
  place.owner = std::move(memory.owner);
  place.data.store(memory.data, std::memory_order_relaxed);
  place.bytes.store(memory.bytes, std::memory_order_relaxed);
  place.generation.store(generation, std::memory_order_release);
  slots_.insert(slot);
}

void RegionTable::erase(uint32_t slot) {
  Entry* place = entry(slot);
  if (place == nullptr || place->owner == nullptr) {
    return;
  }
  place->generation.store(0, std::memory_order_release);
  place->owner.reset();
  slots_.erase(slot);
}

void RegionTable::drop_released(const SignalBlock& owner) {
  if (!is_outdated(owner)) {
    return;
  }
  seen_releases_.store(owner.num_releases(), std::memory_order_relaxed);
  for (auto it = slots_.begin(); it != slots_.end();) {
    const uint32_t slot = *it++;  // erase() invalidates the place it removes
    if (owner.generation(slot) != find(slot).generation) {
      erase(slot);
    }
  }
}

}  // namespace weft
