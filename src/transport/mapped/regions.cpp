// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/regions.hpp"

#include <algorithm>
#include <utility>

namespace weft {

OwnRegions::~OwnRegions() {
  if (!memories_.empty() && signals_.is_here()) {
    for (const auto& [slot, memory] : memories_) {
      signals_.set_generation(slot, 0);
    }
  }
}

Region OwnRegions::add(Memory memory, uint64_t bytes, const Context& context) {
  WEFT_CHECK(
      context,
      memories_.size() < kMaxRegions,
      ErrorCode::kOutOfMemory,
      "allocate: all {} regions are in use",
      kMaxRegions
  );
  uint32_t slot = 0;
  for (auto it = memories_.begin(); it != memories_.end() && it->first == slot; ++it) {
    ++slot;
  }
  last_generation_ = std::max<uint32_t>(last_generation_ + 1, 1);  // 0 means none, after a wrap too
  const uint32_t generation = last_generation_;
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
}

RegionTable::Entry* RegionTable::entry(uint32_t slot) const {
  Page* page =
      slot < kMaxRegions ? pages_[slot / kPageSlots].load(std::memory_order_acquire) : nullptr;
  return page == nullptr ? nullptr : &page->entries[slot % kPageSlots];
}

RegionTable::View RegionTable::find(uint32_t slot) const {
  const Entry* found = entry(slot);
  // Pairs with the release in insert(): a generation seen means data and bytes seen.
  const uint32_t generation =
      found == nullptr ? 0 : found->generation.load(std::memory_order_acquire);
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
  if (slots_.erase(slot) > 0) {
    Entry& place = *entry(slot);
    place.generation.store(0, std::memory_order_release);
    place.owner.reset();
  }
}

void RegionTable::drop_released(const SignalBlock& owner) {
  if (!is_outdated(owner)) {
    return;
  }
  seen_releases_.store(owner.num_releases(), std::memory_order_relaxed);
  for (const uint32_t slot : std::set(slots_)) {
    if (owner.generation(slot) != find(slot).generation) {
      erase(slot);
    }
  }
}

}  // namespace weft
