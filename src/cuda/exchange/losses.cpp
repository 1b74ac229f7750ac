// SPDX-License-Identifier: Apache-2.0
// Lets a CudaExchange go on when ranks are lost.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "call/validate.hpp"
#include "core/clock.hpp"
#include "cuda/exchange/exchange.hpp"
#include "plan/balance/balance.hpp"

namespace weft {

void CudaExchange::watch_for_losses(const Group& group) {
  LossWatch::Kernels kernels = {
      .stop = [this] { stop(); }, .calls = [this] { return ended_calls(); }};
  if (repeats_) {
    kernels.repeats = {
        .try_lock = [this] { return repeats_->try_lock(); },
        .unlock = [this] { repeats_->unlock(); },
        .late = [this] { return late_rank(); },
        .make = [this](const LossWatch::Agreement& agreed) { repeat_calls(agreed); },
        .release = [this] { release_gates(); }};
  }
  losses_ = std::make_unique<LossWatch>(group, context_, settings_.timeout, std::move(kernels));
}

std::optional<LossWatch::Calls> CudaExchange::ended_calls() const {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const auto is_running = [](cudaError_t state) {
    static_cast<void>(cudaGetLastError());  // it is no error of the next launch
    return state == cudaErrorNotReady;
  };
  if (repeats_ && is_running(cudaStreamQuery(repeats_->stream()))) {
    return std::nullopt;
  }
  if (is_running(cudaEventQuery(own_->last_call.get()))) {
    if (!repeats_) {
      return std::nullopt;
    }
    const auto gate = read_gpu<GateState>(&own_->local.get()->gate, quiet_stream());
    return gate.is_held != 0 && gate.is_off == 0 ? std::optional(own_calls()) : std::nullopt;
  }
  return own_calls();
}

void CudaExchange::stop() {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const auto now =
      read_gpu<LocalState>(own_->local.get(), short_work_stream(settings_.device.index));
  if (now.stopped != StopState::kBroken) {
    stop_kernels(now.epoch + 1);
  }
}

// All calls have ended. One that was cut short is void, and so is every later one.
LossWatch::Calls CudaExchange::own_calls() const {
  const auto now = read_gpu<LocalState>(own_->local.get(), quiet_stream());
  const uint64_t last = uint64_t{now.epoch_high} << 32 | now.epoch;
  LossWatch::Calls calls = {.last = last, .first_void = last + 1};
  const auto was_cut_short = [&](uint32_t epoch) {
    const auto ago = static_cast<int32_t>(now.epoch - epoch);
    if (ago >= 0) {
      calls.first_void = std::min(calls.first_void, last - static_cast<uint32_t>(ago));
    }
  };
  if (now.stopped == StopState::kBroken) {
    was_cut_short(now.broken_epoch);
  }
  if (has_fault() && own_->fault.get()->kind != FaultKind::kOldGraph) {
    was_cut_short(own_->fault.get()->epoch);
  }
  if (open_ && !open_->is_captured) {  // it will be received, and is void then
    ++calls.last;
  }
  if (repeats_) {
    const CallRepeats::Group* held =
        now.gate.is_held != 0 ? repeats_->find(now.gate.number) : nullptr;
    calls.passed = now.gate.passed;
    calls.whole = now.gate.whole;
    calls.num_held = held == nullptr ? 0 : held->num_calls;
    // Whatever else is queued comes behind a gate that holds. Without one a replay may run, and a
    // refusal that the caller has yet to hear of would be forgotten.
    const bool is_idle = !open_ && num_queued_ == 0 && counters_.num_captured == 0;
    const bool is_possible = held == nullptr ? is_idle : held->is_possible;
    const bool is_refused = has_fault() && !late_fault();
    calls.can_repeat = is_possible && !is_refused && !is_waiting_for_shape_ ? 1 : 0;
  }
  return calls;
}

void CudaExchange::close_calls(cudaStream_t stream) {
  if (!repeats_ || open_) {
    return;
  }
  if (is_capturing(stream, context_)) {
    num_queued_ == 0 ? repeats_->drop() : keep_none();  // beside a plan that waits for its gate
    return;
  }
  ++num_queued_;
  if (is_plan_alone_) {
    return;
  }
  const GateLaunch gate = {
      .me = view_,
      .number = repeats_->close(static_cast<int>(std::exchange(num_queued_, 0))),
      .done = repeats_->done()};
  launch_gate(gate, stream);
  record_end(stream);
}

bool CudaExchange::is_watch_at_it() const {
  if (!repeats_ || broken_ || is_waiting_for_shape_) {
    return false;
  }
  const bool is_any = losses_->has_news() || losses_->has_left() || late_rank().has_value();
  return is_any && !losses_->has_answered();
}

std::optional<LossWatch::Late> CudaExchange::late_rank() const {
  if (const auto late = late_fault()) {
    return late;
  }
  // Stopped for another reason, of which the host may hear when the stream has ended.
  const bool is_held = repeats_ && repeats_->is_held();
  return is_held ? std::optional(LossWatch::Late{ErrorCode::kTimeout, std::nullopt}) : std::nullopt;
}

std::optional<LossWatch::Late> CudaExchange::late_fault() const {
  if (!has_fault()) {
    return std::nullopt;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // the record was written before its kind
  const FaultRecord& fault = *own_->fault.get();
  const bool is_late = fault.kind == FaultKind::kTimeout && fault.waiting_for < WaitFor::kGrid;
  if (!is_late && fault.kind != FaultKind::kGone) {
    return std::nullopt;
  }
  const bool has_not_begun =
      is_late && (fault.waiting_for == WaitFor::kWord || fault.waiting_for == WaitFor::kRouting);
  return LossWatch::Late{
      .cause = is_late ? ErrorCode::kTimeout : ErrorCode::kPeerFailed,
      .rank = has_not_begun ? std::optional(fault.peer) : std::nullopt};
}

void CudaExchange::repeat_calls(const LossWatch::Agreement& agreed) {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const cudaStream_t stream = repeats_->stream();
  const auto gate = read_gpu<GateState>(&own_->local.get()->gate, stream);
  const CallRepeats::Group* held = gate.is_held != 0 ? repeats_->find(gate.number) : nullptr;
  const bool is_again =
      held != nullptr && agreed.whole < gate.passed + static_cast<uint64_t>(held->num_calls);
  void_calls_ = calls_behind_ = 0;
  is_repeated_ = true;
  go_on_without(losses_->lost(), agreed.last, /*is_queue_void=*/false);
  repeats_->forget_lost(view_);
  if (is_again) {
    for (const CallRepeats::Launch& launch : held->launches) {
      launch(stream);
    }
    launch_gate({.me = view_, .number = held->number, .is_repeated = true}, stream);
  }
  if (held != nullptr) {
    repeats_->open(held->number);
  }
  repeats_->is_unheard.store(true, std::memory_order_release);
  if (!is_again) {
    constexpr uint32_t kOpen = 0;
    uint32_t* const place = &own_->local.get()->gate.is_held;
    write_short(place, &kOpen, sizeof kOpen, stream, context_);
  }
}

void CudaExchange::release_gates() const {
  if (!repeats_) {
    return;
  }
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  constexpr uint32_t kOff = 1;
  const cudaStream_t stream = short_work_stream(settings_.device.index);
  uint32_t* const place = &own_->local.get()->gate.is_off;
  write_short(place, &kOff, sizeof kOff, stream, context_);
}

void CudaExchange::await_gates(cudaStream_t stream) {
  if (!repeats_ || !repeats_->is_far_ahead() || is_capturing(stream, context_)) {
    return;
  }
  const LossWatch::Wait wait(losses_.get());
  auto look = Clock::now() + std::chrono::milliseconds(25);
  while (repeats_->is_far_ahead() && !broken_) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (Clock::now() >= look) {
      look_for_interrupts(stream);
      look = Clock::now() + std::chrono::milliseconds(25);
    }
  }
}

CallReport CudaExchange::take_news() {
  const CallRepeats::Lock lock(repeats_.get());
  CallReport now = report();
  if (repeats_) {
    repeats_->is_unheard.store(false, std::memory_order_relaxed);
    now.lost = lost_ranks();
    std::erase_if(now.lost, [&](int rank) { return std::ranges::count(heard_, rank) != 0; });
    heard_ = lost_ranks();
  }
  return now;
}

void CudaExchange::hear_repeats() {
  if (repeats_ && repeats_->is_unheard.load(std::memory_order_acquire)) {
    const CallReport now = take_news();
    if (settings_.on_loss) {
      settings_.on_loss(now);
    }
  }
}

void CudaExchange::set_local(LocalState* to, const LocalState& now) const {
  const size_t bytes = offsetof(LocalState, wait_ns);  // which goes on
  write_short(to, &now, bytes, quiet_stream(), context_);
}

void CudaExchange::go_on_without(uint32_t lost, uint64_t last_call, bool is_queue_void) {
  const uint64_t epoch = last_call + 1;
  LocalState fresh;
  fresh.epoch = static_cast<uint32_t>(epoch);
  fresh.epoch_high = static_cast<uint32_t>(epoch >> 32);
  fresh.lost = lost;
  fresh.members = ++num_changes_;
  if (own_->fault.get()->kind != FaultKind::kOldGraph) {  // of no call; check() tells it
    *own_->fault.get() = {};
  }
  set_local(own_->local.get(), fresh);
  if (repeats_) {
    const GateState gate = {.passed = epoch, .whole = epoch};
    GateState* const place = &own_->local.get()->gate;
    const auto put = [&](void* to, const void* from, size_t bytes) {
      write_short(to, from, bytes, quiet_stream(), context_);
    };
    put(place, &gate, offsetof(GateState, number));  // one that holds goes on
    put(&place->is_off, &gate.is_off, sizeof gate.is_off);
  }
  if (is_queue_void) {
    if (repeats_) {
      repeats_->drop();
    }
    num_queued_ = 0;
    open_.reset();
    unplaced_.reset();
  }
  num_copies_ = fresh.epoch;  // no rank has made so many
  lost_ = lost;
  memory_->forget(lost);
}

void CudaExchange::await_last_call() const {
  await_stopped(context_, settings_.timeout, [this] {
    return cudaEventQuery(own_->last_call.get()) != cudaErrorNotReady;
  });
  static_cast<void>(cudaGetLastError());  // it is no error of the next launch
}

void CudaExchange::look_for_losses(Op op, ErrorCode cause, std::optional<int> late) {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  stop();
  release_gates();
  std::optional<LossWatch::Agreement> agreed;
  try {
    await_last_call();
    LossWatch::Calls own = own_calls();
    own.can_repeat = 0;
    agreed = losses_->settle(op_name(op), cause, own, late);
  } catch (const Error&) {
    set_broken();
    throw;
  }
  if (agreed) {
    raise_losses(op, *agreed);
  }
}

void CudaExchange::raise_losses(Op op, const LossWatch::Agreement& agreed) {
  is_repeated_ = false;
  void_calls_ = agreed.void_calls;
  calls_behind_ = agreed.calls_behind;
  go_on_without(losses_->lost(), agreed.last);
  losses_->resume();
  losses_->raise(op_name(op), take_news(), settings_.on_loss);
}

void CudaExchange::set_broken() {
  broken_ = std::current_exception();
  release_gates();
  if (losses_) {
    losses_->leave();
  }
}

CallReport CudaExchange::report() const {
  if (!losses_) {
    return Executor::report();
  }
  const CallRepeats::Lock lock(repeats_.get());
  CallReport report = losses_->report();
  report.is_repeated = is_repeated_;
  report.void_calls = void_calls_;
  report.calls_behind = calls_behind_;
  const PhysicalExperts shape = {context_.num_ranks, settings_.num_experts, balance_.replicas};
  report.lost_experts = experts_without_copy(shape, balance_.placement, lost_ranks());
  return report;
}

std::vector<int> CudaExchange::lost_ranks() const {
  std::vector<int> lost;
  for (int rank = 0; lost_ != 0 && rank < context_.num_ranks; ++rank) {
    if ((lost_ >> static_cast<uint32_t>(rank) & 1U) != 0) {
      lost.push_back(rank);
    }
  }
  return lost;
}

void CudaExchange::mask(std::span<const int> ranks) {
  if (!losses_) {
    Executor::mask(ranks);
    return;
  }
  check();
  check_masked(ranks, context_);
  losses_->mask(ranks);
}

bool CudaExchange::grow(int64_t /*max_tokens*/, int /*max_topk*/) {
  refuse_to_grow(settings_, context_);
}

}  // namespace weft
