// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/regions.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

namespace weft::ofi {

// Throws if the region shares bytes with another, as only lent ones may.
void LocalRegions::check_apart(const Region& region) const {
  const std::byte* const end = region.data + region.ref.bytes;
  auto after = entries_.lower_bound(end);
  bool is_apart = entries_.find(region.data) == entries_.end();
  if (is_apart && after != entries_.begin()) {
    const auto& [first, entry] = *--after;
    is_apart = first + entry.bytes <= region.data;
  }
  WEFT_CHECK_ARG(
      fabric_->context(),
      is_apart,
      "lend: {} B at {} are part of a region already",
      region.ref.bytes,
      fmt::ptr(region.data)
  );
}

void LocalRegions::add(Region& region, std::optional<Device> lent_from) {
  {
    const std::shared_lock lock(mutex_);
    check_apart(region);
  }
  const Fabric::Memory area = {
      .data = region.data,
      .bytes = std::max<uint64_t>(region.ref.bytes, 1),
      .device = lent_from.value_or(Device())};
  Owned<fid_mr> memory = fabric_->add_memory(area, FI_WRITE | FI_REMOTE_WRITE, endpoint_);
  region.ref.cookie[kBaseWord] =
      fabric_->has_addresses() ? reinterpret_cast<uint64_t>(region.data) : 0;
  region.ref.cookie[kKeyWord] = fi_mr_key(memory.get());
  const std::unique_lock lock(mutex_);
  entries_[region.data] = {
      .bytes = region.ref.bytes,
      .slot = region.ref.slot,
      .generation = region.ref.generation,
      .is_lent = lent_from.has_value(),
      .memory = std::move(memory)};
  num_lent_ += lent_from.has_value() ? 1 : 0;
}

void LocalRegions::remove(const RegionRef& region) {
  Owned<fid_mr> ended;  // without the lock, which writers take
  const std::unique_lock lock(mutex_);
  const auto found = std::ranges::find_if(entries_, [&](const auto& entry) {
    return entry.second.slot == region.slot && entry.second.generation == region.generation;
  });
  if (found != entries_.end()) {
    ended = std::move(found->second.memory);
    num_lent_ -= found->second.is_lent ? 1 : 0;
    entries_.erase(found);
  }
}

void LocalRegions::withdraw() {
  std::vector<Owned<fid_mr>> ended;
  const std::unique_lock lock(mutex_);
  for (auto& [data, entry] : entries_) {
    ended.push_back(std::move(entry.memory));
  }
}

LocalRegions::Source LocalRegions::source_at(const void* data, uint64_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::shared_lock lock(mutex_);
  auto after = entries_.upper_bound(begin);
  if (after == entries_.begin()) {
    return {};
  }
  const auto& [first, entry] = *--after;
  if (static_cast<uint64_t>(begin - first) + bytes > entry.bytes) {
    return {};
  }
  return {.descriptor = fi_mr_desc(entry.memory.get()), .is_lent = entry.is_lent};
}

namespace {

// True if `generation` is newer; generations count up and may wrap.
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
