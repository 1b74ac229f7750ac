// SPDX-License-Identifier: Apache-2.0
// CudaExchange among fewer and fewer ranks.
#include <algorithm>
#include <cstddef>

#include "call/validate.hpp"
#include "cuda/exchange/exchange.hpp"
#include "plan/balance/balance.hpp"

namespace weft {

void CudaExchange::watch_for_losses(const Group& group) {
  losses_ = std::make_unique<LossWatch>(
      group,
      context_,
      settings_.timeout,
      LossWatch::Kernels{.stop = [this] { stop(); }, .calls = [this] { return ended_calls(); }}
  );
}

std::optional<LossWatch::Calls> CudaExchange::ended_calls() const {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  if (cudaEventQuery(own_->last_call.get()) == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // it is no error of the next launch
    return std::nullopt;
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

// All of them have ended. A call that was cut short is void, and so is whatever came after it.
LossWatch::Calls CudaExchange::own_calls() const {
  const auto now = read_gpu<LocalState>(own_->local.get());
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
  return calls;
}

void CudaExchange::set_local(LocalState* to, const LocalState& now) const {
  const cudaStream_t stream = own_->stream.get();
  const size_t bytes = offsetof(LocalState, wait_ns);  // which goes on
  WEFT_CUDA(context_, cudaMemcpyAsync(to, &now, bytes, cudaMemcpyHostToDevice, stream));
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));
}

void CudaExchange::go_on_without(uint32_t lost, uint64_t last_call) {
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
  num_copies_ = fresh.epoch;  // no rank has made so many
  lost_ = lost;
  open_.reset();
  unplaced_.reset();
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
  std::optional<LossWatch::Agreement> agreed;
  try {
    await_last_call();
    agreed = losses_->settle(op_name(op), cause, own_calls(), late);
  } catch (const Error&) {
    set_broken();
    throw;
  }
  if (agreed) {
    raise_losses(op, *agreed);
  }
}

void CudaExchange::raise_losses(Op op, const LossWatch::Agreement& agreed) {
  void_calls_ = agreed.void_calls;
  calls_behind_ = agreed.calls_behind;
  go_on_without(losses_->lost(), agreed.last);
  losses_->resume();
  losses_->raise(op_name(op), report(), settings_.on_loss);
}

void CudaExchange::set_broken() {
  broken_ = std::current_exception();
  if (losses_) {
    losses_->leave();
  }
}

CallReport CudaExchange::report() const {
  if (!losses_) {
    return Executor::report();
  }
  CallReport report = losses_->report();
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
