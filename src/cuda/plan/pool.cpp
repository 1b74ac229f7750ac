// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan/pool.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"

namespace weft {

PlanPool::PlanPool(std::shared_ptr<PeerMemory> memory, uint64_t plan_bytes)
    : memory_(std::move(memory)), plan_bytes_(plan_bytes) {}

PlanPool::~PlanPool() {
  if (coming_) {
    memory_->release(*coming_);
  }
  for (const PeerRegion& region : regions_) {
    memory_->release(region);
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
  add(region);
  return true;
}

void PlanPool::look_ahead() {
  if (coming_ && memory_->is_reachable(*coming_)) {
    add(*std::exchange(coming_, {}));
  }
  uint64_t more = 0;
  {
    const std::lock_guard lock(mutex_);
    if (coming_ || !may_look_ahead_ || unused_.size() > num_plans_ / 4) {
      return;
    }
    more = (num_plans_ + 1) / 2;
  }
  try {
    coming_ = memory_->allocate(more * plan_bytes_);
  } catch (const Error& error) {  // there are plans left, and some may come back
    may_look_ahead_ = false;
    log(LogLevel::kDebug, "plan: no memory for {} more plans: {}", more, error.what());
  }
}

void PlanPool::add(const PeerRegion& region) {
  regions_.push_back(region);
  const std::lock_guard lock(mutex_);
  const uint64_t count = region.bytes / plan_bytes_;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t offset = i * plan_bytes_;
    unused_.push_back(
        {region.data + offset, plan_bytes_, {.region = region.region, .offset = offset}}
    );
  }
  num_plans_ += count;
}

std::shared_ptr<const Block> PlanPool::take() {
  const std::lock_guard lock(mutex_);
  if (unused_.empty()) {
    return nullptr;
  }
  const Block block = unused_.back();
  unused_.pop_back();
  return {new Block(block), [pool = shared_from_this()](const Block* taken) {
            pool->give_back(*taken);
            delete taken;
          }};
}

void PlanPool::give_back(const Block& block) {
  const std::lock_guard lock(mutex_);
  unused_.push_back(block);
}

uint64_t PlanPool::bytes() const {
  uint64_t bytes = coming_ ? coming_->bytes : 0;
  for (const PeerRegion& region : regions_) {
    bytes += region.bytes;
  }
  return bytes;
}

}  // namespace weft
