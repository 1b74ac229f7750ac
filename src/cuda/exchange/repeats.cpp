// SPDX-License-Identifier: Apache-2.0
#include "cuda/exchange/repeats.hpp"

#include <algorithm>
#include <utility>

#include "core/gpu/stream.hpp"

namespace weft {

CallRepeats::CallRepeats(int gpu, const Context& context)
    : stream_(make_urgent_stream(gpu, Urgency::kRepetition)) {
  done_.create(2, context);
  done_.get()[0] = 0;
  done_.get()[1] = 0;
}

bool CallRepeats::try_lock() {
  const bool is_locked = mutex_.try_lock();
  depth_ += is_locked ? 1 : 0;
  return is_locked;
}

void CallRepeats::lock() {
  mutex_.lock();
  ++depth_;
}

void CallRepeats::unlock() {
  --depth_;
  mutex_.unlock();
}

void CallRepeats::keep(Launch launch, const PlanView& plan) {
  if (launch) {
    open_.launches.push_back(std::move(launch));
  } else {
    open_.is_possible = false;
  }
  if (plan.data != nullptr) {
    open_.plans.push_back(plan);
  }
}

uint64_t CallRepeats::close(int num_calls) {
  const uint64_t done = *static_cast<volatile uint64_t*>(done_.get());
  while (!closed_.empty() && closed_.front().number <= done) {
    closed_.pop_front();
  }
  open_.number = ++num_gates_;
  open_.num_calls = num_calls;
  closed_.push_back(std::exchange(open_, {}));
  return num_gates_;
}

const CallRepeats::Group* CallRepeats::find(uint64_t number) const {
  const auto found = std::ranges::find(closed_, number, &Group::number);
  return found == closed_.end() ? nullptr : &*found;
}

void CallRepeats::keep_plan(const std::shared_ptr<const DevicePlan>& plan, const PlanView& view) {
  if (plans_.size() >= sweep_at_) {
    std::erase_if(plans_, [](const KnownPlan& one) { return one.alive.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * plans_.size());
  }
  plans_.push_back({plan, view});
}

void CallRepeats::forget_lost(const RankView& me) const {
  for (const KnownPlan& one : plans_) {
    if (const auto plan = one.alive.lock()) {
      launch_forget_lost(me, one.view, stream_.get());
    }
  }
  for (const Group& group : closed_) {
    for (const PlanView& plan : group.plans) {
      launch_forget_lost(me, plan, stream_.get());
    }
  }
}

}  // namespace weft
