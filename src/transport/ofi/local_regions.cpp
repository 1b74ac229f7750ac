// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/local_regions.hpp"

#include <algorithm>
#include <mutex>
#include <sys/mman.h>
#include <utility>

#include "group/map_pages.hpp"

namespace weft::ofi {
namespace {

// Pages and their registration, which ends first.
struct Pages {
  explicit Pages(uint64_t size) : data(map_pages(-1, size, ErrorCode::kOutOfMemory)), bytes(size) {}
  ~Pages() {
    memory.reset();
    ::munmap(data, bytes);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::byte* data;
  uint64_t bytes;
  Owned<fid_mr> memory;
};

}  // namespace

LocalRegions::LocalRegions(
    std::shared_ptr<Fabric> fabric, const SignalBlock& signals, fid_ep* endpoint
)
    : fabric_(std::move(fabric)), endpoint_(endpoint) {
  regions_.publish_in(signals);
}

Region LocalRegions::allocate(uint64_t bytes) {
  auto pages = std::make_shared<Pages>(std::max<uint64_t>(bytes, 1));
  pages->memory =
      fabric_->add_memory(pages->data, pages->bytes, FI_WRITE | FI_REMOTE_WRITE, endpoint_);
  fid_mr* const memory = pages->memory.get();
  const auto address = reinterpret_cast<uint64_t>(pages->data);
  std::byte* const data = pages->data;
  Memory held = {
      .data = data,
      .bytes = pages->bytes,
      .cookie = {fabric_->has_addresses() ? address : 0, fi_mr_key(memory), address, 0},
      .owner = std::move(pages)};
  const Region region = regions_.add(std::move(held), bytes, fabric_->context());
  const std::unique_lock lock(mutex_);
  data_[region.ref.slot] = data;
  spans_[data] = {.bytes = bytes, .descriptor = fi_mr_desc(memory)};
  return region;
}

void LocalRegions::release(const RegionRef& region) {
  const std::byte* data = nullptr;
  if (const auto found = data_.find(region.slot); found != data_.end()) {
    data = found->second;
  }
  regions_.remove(region, fabric_->context());  // throws for what is not allocated
  const std::unique_lock lock(mutex_);
  spans_.erase(data);
  data_.erase(region.slot);
}

void* LocalRegions::descriptor(const void* data, uint64_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::shared_lock lock(mutex_);
  auto after = spans_.upper_bound(begin);
  if (after == spans_.begin()) {
    return nullptr;
  }
  const auto& [first, span] = *--after;
  const bool is_inside = static_cast<uint64_t>(begin - first) + bytes <= span.bytes;
  return is_inside ? span.descriptor : nullptr;
}

}  // namespace weft::ofi
