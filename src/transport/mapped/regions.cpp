// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/region_table.hpp"

#include <utility>

namespace weft {

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

bool RegionTable::is_outdated(const SignalBlock& owner) const {
  return owner.num_releases() != seen_releases_.load(std::memory_order_relaxed);
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
