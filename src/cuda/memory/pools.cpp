// SPDX-License-Identifier: Apache-2.0
#include "cuda/memory/pools.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"
#include "core/size_class.hpp"

namespace weft {
namespace {

// How long take() waits for peers to map a new region; until they do, dispatch into it is staged.
// Short: a peer that is ahead may not map it before its kernel ends, which waits for this rank's
// next call.
constexpr auto kPatience = std::chrono::milliseconds(20);

// Blocks up to this size share regions, whose number is bounded.
constexpr uint64_t kLargestShared = 16 << 20;
constexpr uint64_t kSmallestShared = 64 << 10;
constexpr uint64_t kSharedPieces = 8;

}  // namespace

Pool::~Pool() {
  for (const PeerRegion& region : regions_) {
    memory_->release(region);
  }
}

void Pool::add(const PeerRegion& region, uint64_t block_bytes) {
  const std::lock_guard lock(mutex_);
  regions_.push_back(region);
  for (uint64_t end = block_bytes; end <= region.bytes; end += block_bytes) {
    const uint64_t offset = end - block_bytes;
    unused_.push_back(
        {region.data + offset, block_bytes, {.region = region.region, .offset = offset}}
    );
  }
}

template <class Choose>
std::shared_ptr<const Block> Pool::take_from(
    std::vector<Block>& from, std::vector<Block>& to, const Choose& choose
) {
  const auto chosen = choose(from);
  if (chosen == from.end()) {
    return nullptr;
  }
  const auto* block = new Block(*chosen);
  from.erase(chosen);
  used_bytes_ += block->bytes;
  return {block, [pool = shared_from_this(), &to](const Block* taken) {
            const std::lock_guard inner(pool->mutex_);
            to.push_back(*taken);
            pool->used_bytes_ -= taken->bytes;
            delete taken;
          }};
}

uint64_t Pool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

uint64_t Pool::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const Block& block : unused_) {
    bytes += block.bytes;
  }
  for (const Block& block : in_graphs_) {
    bytes += block.bytes;
  }
  return bytes;
}

std::shared_ptr<const Block> BlockPool::take(uint64_t bytes) {
  // The smallest that fits, if it does not waste half.
  const auto best_of = [&](std::vector<Block>& unused) {
    auto best = unused.end();
    for (auto it = unused.begin(); it != unused.end(); ++it) {
      const bool fits = it->bytes >= bytes && it->bytes / 2 <= size_class(bytes);
      best = fits && (best == unused.end() || it->bytes < best->bytes) ? it : best;
    }
    return best;
  };
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (auto block = take_from(unused_, unused_, best_of)) {
        return block;
      }
    }
    const bool is_shared = bytes <= kLargestShared;
    const uint64_t piece = std::bit_ceil(std::max(bytes, kSmallestShared));
    const PeerRegion region =
        memory_->allocate(is_shared ? kSharedPieces * piece : size_class(bytes));
    // A region that a peer does not reach is filled from staging.
    static_cast<void>(memory_->wait_reachable(region, kPatience));
    add(region, is_shared ? piece : region.bytes);
  }
}

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

PlanPool::~PlanPool() {
  if (coming_) {
    memory_->release(*coming_);
  }
}

bool PlanPool::grow(uint64_t num_plans, std::chrono::milliseconds at_most) {
  may_look_ahead_ = true;
  const PeerRegion region =
      coming_ ? *std::exchange(coming_, {}) : memory_->allocate(num_plans * plan_bytes_);
  if (!memory_->wait_reachable(region, at_most)) {
    memory_->release(region);
    return false;
  }
  add(region, plan_bytes_);
  return true;
}

void PlanPool::look_ahead() {
  if (coming_ && memory_->is_reachable(*coming_)) {
    add(*std::exchange(coming_, {}), plan_bytes_);
  }
  uint64_t more = 0;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t all = unused_.size() + in_graphs_.size() + used_bytes_ / plan_bytes_;
    if (coming_ || !may_look_ahead_ || unused_.size() > all / 4) {
      return;
    }
    more = (all + 1) / 2;
  }
  try {
    coming_ = memory_->allocate(more * plan_bytes_);
  } catch (const Error& error) {  // there are plans left, and some may come back
    may_look_ahead_ = false;
    log(LogLevel::kDebug, "plan: no memory for {} more plans: {}", more, error.what());
  }
}

std::shared_ptr<const Block> PlanPool::take(bool is_captured) {
  const auto last_of = [](std::vector<Block>& blocks) {
    return blocks.empty() ? blocks.end() : std::prev(blocks.end());
  };
  const std::lock_guard lock(mutex_);
  if (!is_captured) {
    return take_from(unused_, unused_, last_of);
  }
  auto block = take_from(in_graphs_, in_graphs_, last_of);
  return block ? block : take_from(unused_, in_graphs_, last_of);
}

}  // namespace weft
