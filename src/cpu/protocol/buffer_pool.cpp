// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/buffer_pool.hpp"

#include <algorithm>

#include "core/size_class.hpp"
#include "group/shared_memory.hpp"

namespace weft {
namespace {

uint64_t sum_of_bytes(const std::vector<Region>& regions) {
  uint64_t sum = 0;
  for (const Region& region : regions) {
    sum += region.ref.bytes;
  }
  return sum;
}

}  // namespace

std::shared_ptr<const Region> BufferPool::take(uint64_t bytes) {
  const uint64_t wanted = size_class(bytes);
  const std::lock_guard lock(mutex_);
  // Finds the smallest that fits: too small ones wrap round to a huge waste. One of up to twice the
  // need is taken, else a new region made.
  const auto waste = [&](const Region& region) { return region.ref.bytes - wanted; };
  const auto best = std::ranges::min_element(unused_, {}, waste);
  Region region;
  if (best != unused_.end() && waste(*best) <= wanted) {
    region = *best;
    unused_.erase(best);
  } else {
    trim();
    region = transport_->allocate(wanted);
  }
  used_.push_back(region);
  return {new Region(region), [pool = shared_from_this()](const Region* held) {
            pool->give_back(*held);
            delete held;
          }};
}

void BufferPool::give_back(const Region& region) {
  const std::lock_guard lock(mutex_);
  std::erase_if(used_, [&](const Region& one) { return one.data == region.data; });
  unused_.push_back(region);
}

void BufferPool::trim() {
  constexpr uint64_t kKeepBytes = 64 << 20;
  const uint64_t limit = std::max(kKeepBytes, 2 * sum_of_bytes(used_));
  while (unused_.size() > 1 && sum_of_bytes(unused_) > limit) {
    transport_->release(unused_.front().ref);
    unused_.erase(unused_.begin());
  }
}

std::optional<Region> BufferPool::find(const std::byte* data, uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  for (const Region& region : used_) {
    if (data >= region.data && data + bytes <= region.data + region.ref.bytes) {
      return region;
    }
  }
  return std::nullopt;
}

void BufferPool::release_unused() {
  const std::lock_guard lock(mutex_);
  for (const Region& region : unused_) {
    transport_->release(region.ref);
  }
  unused_.clear();
}

void BufferPool::withdraw() {
  const std::lock_guard lock(mutex_);
  transport_->withdraw();
  for (const Region& region : used_) {
    make_private(region.data, region.ref.bytes);
  }
}

uint64_t BufferPool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return sum_of_bytes(used_);
}

uint64_t BufferPool::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  return sum_of_bytes(unused_);
}

}  // namespace weft
