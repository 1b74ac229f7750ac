// SPDX-License-Identifier: Apache-2.0
// How a call on a GPU fails: what a kernel wrote to the fault record becomes an exception.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "core/interrupt.hpp"
#include "core/log.hpp"
#include "cuda/exchange/exchange.hpp"

namespace weft {

void CudaExchange::check() {
  {
    const CallRepeats::Lock lock(repeats_.get());
    check_behind(std::nullopt);
  }
  hear_repeats();
}

void CudaExchange::check_behind(std::optional<cudaStream_t> stream) {
  check_faults(stream);
  if (has_misuse()) {
    std::atomic_thread_fence(std::memory_order_acquire);
    const FaultRecord misuse = std::exchange(own_->fault.get()[1], {});
    raise_error(ErrorCode::kInvalidArgument, context_, fault_text(misuse, view_));
  }
}

void CudaExchange::check_faults(std::optional<cudaStream_t> stream) {
  if (broken_) {
    std::rethrow_exception(broken_);
  }
  const bool is_news = losses_ && losses_->has_news();
  if (is_watch_at_it()) {
    return;
  }
  if (is_news) {
    losses_->follow_caller();
    look_for_losses(running_op_, ErrorCode::kPeerFailed);
  }
  if (has_fault()) {
    std::atomic_thread_fence(std::memory_order_acquire);  // the record was written before its kind
    throw_fault(stream);
  }
}

void CudaExchange::look_for_interrupts(cudaStream_t stream) {
  bool is_any = InterruptScope::is_interrupted();
  const bool is_own = is_any;
  for (int peer = 0; peer < view_.num_ranks && !is_any; ++peer) {
    is_any = (lost_ >> static_cast<uint32_t>(peer) & 1U) == 0 &&
             refusals_->interrupted(peer).has_value();
  }
  if (!is_any) {
    return;
  }
  const RelaxedCapture no_capture;
  const uint32_t call = running_call();
  if (is_own) {
    interrupt();
    const uint32_t number = call_number(view_, call);
    const auto text = fmt::format("interrupted while it waited for the GPU (call {})", number);
    break_off(ErrorCode::kInterrupted, text, stream);
  }
  if (const std::string text = interrupt_text(call); !text.empty()) {
    stop_kernels(call);
    break_off(ErrorCode::kPeerFailed, text, stream);
  }
}

uint32_t CudaExchange::running_call() const {
  return read_gpu<uint32_t>(&own_->local.get()->epoch, short_work_stream(settings_.device.index)) +
         1;
}

void CudaExchange::interrupt() {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const uint32_t call = running_call();
  stop_kernels(call);
  release_gates();
  if (losses_) {
    losses_->leave();
  } else {
    refusals_->interrupt(call);
  }
}

void CudaExchange::stop_kernels(uint32_t call) {
  constexpr StopState kState = StopState::kBroken;
  LocalState* const local = own_->local.get();
  const cudaStream_t stream = short_work_stream(settings_.device.index);
  const auto put = [&](void* to, const void* from, size_t bytes) {
    write_short(to, from, bytes, stream, context_);
  };
  put(&local->broken_epoch, &call, sizeof call);
  put(&local->stopped, &kState, sizeof kState);
}

std::string CudaExchange::interrupt_text(uint32_t own) const {
  for (int peer = 0; peer < view_.num_ranks; ++peer) {
    const std::optional<uint32_t> call = refusals_->interrupted(peer);
    if (call && static_cast<int32_t>(own - *call) >= 0) {  // calls before it have ended there
      return fmt::format(
          "rank {} was interrupted in call {} (this is call {})",
          rank_names_.empty() ? peer : rank_names_[static_cast<size_t>(peer)],
          call_number(view_, *call),
          call_number(view_, own)
      );
    }
  }
  return {};
}

void CudaExchange::break_off(ErrorCode code, std::string_view text, cudaStream_t stream) {
  // Then nothing of the call touches the caller's tensors any more.
  const Deadline deadline(std::chrono::seconds(1));
  while (cudaStreamQuery(stream) == cudaErrorNotReady && !deadline.has_passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  static_cast<void>(cudaGetLastError());
  try {
    raise_error(code, context_, fmt::format("{}: {}", op_name(running_op_), text));
  } catch (const Error&) {
    set_broken();
    throw;
  }
}

bool CudaExchange::refuse(Op op, const Refusal& reason, const CallOptions& call) {
  const CudaDeviceGuard guard(settings_.device.index);
  const CallRepeats::Lock lock(repeats_.get());
  const cudaStream_t stream = stream_of(call);
  if (is_capturing(stream, context_)) {
    return false;
  }
  unplaced_.reset();
  if (broken_) {
    return true;
  }
  receive_open(stream);
  const uint32_t number = refuse_one(op == Op::kPlanAndDispatch ? Op::kPlan : op, reason, stream);
  refused_plan_ = op == Op::kPlan || op == Op::kPlanAndDispatch ? number : 0;
  // With a stream no rank waits for the plan: when the others hear that it was refused here, they
  // have dispatched already, unless one launch makes both.
  if (op == Op::kPlanAndDispatch && call.stream != nullptr && do_peers_only_plan(number)) {
    refuse_one(Op::kDispatch, reason, stream);
  }
  return true;
}

uint32_t CudaExchange::refuse_one(Op op, const Refusal& reason, cudaStream_t stream) {
  // Behind the previous call, in whatever stream, the GPU knows the number of this one.
  WEFT_CUDA(context_, cudaStreamWaitEvent(stream, own_->last_call.get()));
  const auto wait = [&] {
    repeats_ ? repeats_->unlocked([&] { wait_for(stream); }) : wait_for(stream);
  };
  wait();
  const uint32_t number = read_gpu<uint32_t>(&own_->local.get()->epoch) + 1;
  refusals_->post(number, reason);
  launch_refusal(view_, op, stream);
  record_end(stream);
  wait();
  keep_none();
  is_plan_alone_ = false;
  close_calls(stream);
  return number;
}

// Every rank that gives a plan up says on the board whether that is for want of room: its own, or
// that of the rank which it has heard of.
bool CudaExchange::is_outgrown() const {
  if (broken_ || losses_ || refused_plan_ == 0) {
    return false;
  }
  const CudaDeviceGuard guard(settings_.device.index);
  const Deadline deadline(settings_.timeout);
  const auto wait_until = [&](const auto& is_there) {
    while (!is_there() && !deadline.has_passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  };
  for (uint32_t peer = 0; peer < control_map_.num_ranks; ++peer) {
    std::optional<Refusal> reason;
    if (static_cast<int>(peer) != view_.rank) {
      wait_until([&] { return survey_control(refused_plan_).words[peer] == refused_plan_; });
      const auto word = read_gpu<DeviceHandshake>(
          memory_->control().data + control_map_.word_offset(refused_plan_, peer)
      );
      if (word.op != Op::kPlan || word.stamp != view_.stamp) {
        return false;
      }
    }
    wait_until([&] {
      reason = refusals_->reason(static_cast<int>(peer), refused_plan_);
      return reason.has_value();
    });
    if (!reason || reason->is_for_room == 0) {
      const auto own = refusals_->reason(view_.rank, refused_plan_);
      const bool is_of_peer = reason && !reason->text().empty() && own && own->is_for_room != 0;
      WEFT_CHECK_ARG(
          context_, !is_of_peer, "plan: rank {} refused the call: {}", peer, reason->text()
      );
      return false;
    }
  }
  return true;
}

// The handshakes of a call stay for two calls.
bool CudaExchange::do_peers_only_plan(uint32_t epoch) const {
  for (uint32_t peer = 0; peer < control_map_.num_ranks; ++peer) {
    const auto word =
        read_gpu<DeviceHandshake>(memory_->control().data + control_map_.word_offset(epoch, peer));
    if (word.op == Op::kPlan && word.stamp == view_.stamp) {
      if (const std::optional<bool> has_rows = has_dispatch(word.signature)) {
        return !*has_rows;
      }
    }
  }
  return false;
}

void CudaExchange::set_launched(cudaStream_t stream) {
  is_launched_ = true;
  counters_.num_captured += record_end(stream) ? 0 : 1;
}

bool CudaExchange::record_end(cudaStream_t stream) const {
  if (is_capturing(stream, context_)) {
    return false;
  }
  WEFT_CUDA(context_, cudaEventRecord(own_->last_call.get(), stream));
  return true;
}

// Clears the fault once this rank's part of the call has ended, in whatever stream it was replayed,
// and what is queued behind it: of a replay that runs meanwhile some blocks would find the call
// given up, and others not. No other rank is waited for: a peer on the same GPU may wait for this
// rank.
bool CudaExchange::clear_fault(uint32_t epoch, std::optional<cudaStream_t> stream) {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const auto deadline = std::chrono::steady_clock::now() + 2 * settings_.timeout;  // of its waits
  const auto wait = [&] {
    WEFT_CUDA(context_, cudaEventSynchronize(own_->last_call.get()));
    if (stream && !is_capturing(*stream, context_)) {
      WEFT_CUDA(context_, cudaStreamSynchronize(*stream));
    }
  };
  repeats_ ? repeats_->unlocked(wait) : wait();
  const auto now = [&] { return read_gpu<uint32_t>(&own_->local.get()->epoch); };
  while (static_cast<int32_t>(now() - epoch) < 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (read_gpu<LocalState>(own_->local.get()).stopped == StopState::kBroken) {
    return false;
  }
  *own_->fault.get() = {};  // first: once calls may go on, the next fault may come
  const cudaStream_t own = own_->stream.get();
  WEFT_CUDA(context_, cudaMemsetAsync(&own_->local.get()->stopped, 0, sizeof(StopState), own));
  WEFT_CUDA(context_, cudaStreamSynchronize(own));
  return true;
}

// Returns why a peer has refused the call. Its host posts what its GPU found a moment later; for a
// plan, that decides whether all grow.
std::optional<Refusal> CudaExchange::awaited_reason(const FaultRecord& refused) const {
  const Deadline deadline(std::chrono::seconds(1));
  std::optional<Refusal> reason = refusals_->reason(refused.peer, refused.epoch);
  while (!reason && refused.op == Op::kPlan && !losses_ && !deadline.has_passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    reason = refusals_->reason(refused.peer, refused.epoch);
  }
  return reason;
}

void CudaExchange::throw_fault(std::optional<cudaStream_t> stream) {
  FaultRecord record = *own_->fault.get();
  if (record.kind == FaultKind::kOldGraph) {  // it has done nothing
    *own_->fault.get() = {};
    raise_error(ErrorCode::kInvalidArgument, context_, fault_text(record, view_));
  }
  has_thrown_fault_ = true;
  const int peer = record.peer;
  RankView named = view_;
  if (!rank_names_.empty()) {
    named.rank = rank_names_[static_cast<size_t>(view_.rank)];
    record.peer = peer < 0 ? -1 : rank_names_[static_cast<size_t>(peer)];
  }
  ControlSurvey survey;
  Refusal heard;
  if (record.kind == FaultKind::kRefused) {
    heard = awaited_reason(record).value_or(Refusal());
    survey.refusal = heard.text();
  }
  const bool is_late = record.kind == FaultKind::kTimeout;
  const bool is_gone = record.kind == FaultKind::kGone;
  const bool is_mutual = !is_late && !is_gone && record.kind != FaultKind::kStranger &&
                         record.kind != FaultKind::kUnmapped;
  if (losses_) {
    const bool is_of_rank = is_gone || (is_late && record.waiting_for < WaitFor::kGrid);
    // A rank that knows of a loss before this one does says no more than that it refuses.
    const bool may_be_news = record.kind == FaultKind::kRefused && survey.refusal.empty();
    if (is_of_rank || (may_be_news && losses_->await_news(std::chrono::milliseconds(100)))) {
      // A rank that has said nothing in a call, not even that it makes it, has not begun it.
      const bool has_not_begun = is_late && (record.waiting_for == WaitFor::kWord ||
                                             record.waiting_for == WaitFor::kRouting);
      look_for_losses(
          record.op,
          is_late ? ErrorCode::kTimeout : ErrorCode::kPeerFailed,
          has_not_begun ? std::optional(peer) : std::nullopt
      );
    }
  }
  // Nothing was harmed if all ranks gave the call up, and count it.
  if (is_mutual && clear_fault(record.epoch, stream)) {
    if (record.op == Op::kPlan && !losses_) {
      const bool is_too_many = record.kind == FaultKind::kTooMany && record.what <= kMaxTopk;
      heard.is_for_room = is_too_many ? 1 : heard.is_for_room;
      refusals_->post(record.epoch, heard);
      refused_plan_ = record.epoch;
    }
    raise_error(ErrorCode::kInvalidArgument, context_, fault_text(record, named, survey));
  }
  const bool is_of_peer = is_late && record.waiting_for < WaitFor::kGrid;
  const PeerState state = is_of_peer ? memory_->peer_state(peer) : PeerState::kAlive;
  try {
    if (const std::string text = interrupt_text(record.epoch); is_late && !text.empty()) {
      WEFT_RAISE(context_, ErrorCode::kPeerFailed, "{}: {}", op_name(record.op), text);
    }
    WEFT_CHECK(
        context_,
        state == PeerState::kAlive,
        ErrorCode::kPeerFailed,
        "{}: rank {} {} during call {}",
        op_name(record.op),
        record.peer,
        state == PeerState::kDied ? "died" : "left the exchange",
        call_number(view_, record.epoch)
    );
    if (is_late) {
      try {
        survey = survey_control(record.epoch);
      } catch (const Error& error) {  // the timeout is what matters
        log(LogLevel::kDebug, "exchange: {}", error.what());
      }
    }
    std::string problem = fault_text(record, named, survey);
    if (is_mutual) {
      problem += fmt::format(
          "; then no handshake for {} from rank {}",
          seconds_text(settings_.timeout),
          fmt::join(silent_ranks(), ", ")
      );
    }
    const ErrorCode code = is_late || is_mutual ? ErrorCode::kTimeout
                           : is_gone            ? ErrorCode::kPeerFailed
                                                : ErrorCode::kInternal;
    raise_error(code, context_, problem);
  } catch (const Error&) {
    set_broken();
    throw;
  }
}

std::vector<int> CudaExchange::silent_ranks() const {
  const uint32_t epoch = read_gpu<LocalState>(own_->local.get()).epoch;
  const std::vector<uint32_t> words = survey_control(epoch).words;
  std::vector<int> silent;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank] != epoch) {
      silent.push_back(rank_names_.empty() ? static_cast<int>(rank) : rank_names_[rank]);
    }
  }
  return silent;
}

ControlSurvey CudaExchange::survey_control(uint32_t epoch) const {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const std::byte* control = memory_->control().data;
  ControlSurvey survey = {.stamp = read_gpu<uint64_t>(control + control_map_.stamp_offset())};
  for (uint32_t peer = 0; peer < control_map_.num_ranks; ++peer) {
    const uint32_t slot = control_map_.signals().word(epoch, peer);
    survey.words.push_back(read_gpu<uint32_t>(control + sizeof(uint32_t) * slot));
  }
  return survey;
}

}  // namespace weft
