// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory/buffers.hpp"

#include <algorithm>
#include <bit>

#include "core/check.hpp"
#include "core/size_class.hpp"

namespace weft {
namespace {

// How long a new region may stay unknown to peers before it is handed out; until they know it,
// dispatch into it is staged. Short: a peer that is ahead may not map it before its kernel ends,
// and that waits for this rank's next call.
constexpr auto kPatience = std::chrono::milliseconds(20);

// Blocks up to this size share regions, whose number is bounded.
constexpr uint64_t kLargestShared = 16 << 20;
constexpr uint64_t kSmallestShared = 64 << 10;
constexpr uint64_t kSharedPieces = 8;

Block whole(const PeerRegion& region) {
  return {region.data, region.bytes, {.region = region.region, .offset = 0}};
}

}  // namespace

BlockPool::BlockPool(std::shared_ptr<PeerMemory> memory) : memory_(std::move(memory)) {}

BlockPool::~BlockPool() {
  for (const PeerRegion& region : regions_) {
    memory_->release(region);
  }
}

// One that a peer does not reach is filled from staging.
PeerRegion BlockPool::new_region(uint64_t bytes) {
  const PeerRegion region = memory_->allocate(bytes);
  static_cast<void>(memory_->wait_reachable(region, kPatience));
  return region;
}

// Into unused blocks.
void BlockPool::cut(const PeerRegion& region, uint64_t piece_bytes) {
  const std::lock_guard lock(mutex_);
  regions_.push_back(region);
  for (uint64_t i = 0; i < region.bytes / piece_bytes; ++i) {
    Block block = whole(region);
    block.address.offset = i * piece_bytes;
    block.data += block.address.offset;
    block.bytes = piece_bytes;
    unused_.push_back(block);
  }
}

// The smallest unused block that fits, if it does not waste half.
Block BlockPool::take_unused(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = unused_.end();
  for (auto it = unused_.begin(); it != unused_.end(); ++it) {
    const bool fits = it->bytes >= bytes && it->bytes / 2 <= size_class(bytes);
    if (fits && (best == unused_.end() || it->bytes < best->bytes)) {
      best = it;
    }
  }
  Block block;
  if (best != unused_.end()) {
    block = *best;
    unused_.erase(best);
  }
  return block;
}

std::shared_ptr<const Block> BlockPool::take(uint64_t bytes) {
  Block block = take_unused(bytes);
  if (block.data == nullptr && bytes <= kLargestShared) {
    const uint64_t piece_bytes = std::bit_ceil(std::max(bytes, kSmallestShared));
    cut(new_region(kSharedPieces * piece_bytes), piece_bytes);
    block = take_unused(bytes);
  } else if (block.data == nullptr) {
    const PeerRegion region = new_region(size_class(bytes));
    block = whole(region);
    const std::lock_guard lock(mutex_);
    regions_.push_back(region);
  }
  const std::lock_guard lock(mutex_);
  used_bytes_ += block.bytes;
  return {new Block(block), [pool = shared_from_this()](const Block* taken) {
            pool->give_back(*taken);
            delete taken;
          }};
}

void BlockPool::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  unused_.push_back(block);
  used_bytes_ -= block.bytes;
}

// Regions none of whose blocks is in use.
void BlockPool::release_unused() {
  const std::lock_guard lock(mutex_);
  std::erase_if(regions_, [&](const PeerRegion& region) {
    const auto is_inside = [&](const Block& block) {
      return block.address.region == region.region;
    };
    uint64_t unused_bytes = 0;
    for (const Block& block : unused_) {
      unused_bytes += is_inside(block) ? block.bytes : 0;
    }
    if (unused_bytes < region.bytes) {
      return false;
    }
    std::erase_if(unused_, is_inside);
    memory_->release(region);
    return true;
  });
}

uint64_t BlockPool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

uint64_t BlockPool::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const Block& block : unused_) {
    bytes += block.bytes;
  }
  return bytes;
}

}  // namespace weft
