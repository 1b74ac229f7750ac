// SPDX-License-Identifier: Apache-2.0
// How a call on a GPU fails: what a kernel wrote to the fault record becomes an exception.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "core/log.hpp"
#include "cuda/exchange/exchange.hpp"

namespace weft {

void CudaExchange::check() {
  if (broken_) {
    std::rethrow_exception(broken_);
  }
  if (has_fault()) {
    std::atomic_thread_fence(std::memory_order_acquire);  // the record was written before its kind
    throw_fault();
  }
}

void CudaExchange::finish(cudaStream_t stream) {
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));
  check();
}

bool CudaExchange::refuse(Op op, std::string_view reason, const CallOptions& call) {
  const CudaDeviceGuard guard(settings_.device.index);
  const cudaStream_t stream = stream_of(call);
  if (is_capturing(stream, context_)) {
    return false;
  }
  if (broken_) {
    return true;
  }
  const uint32_t number = refuse_one(op == Op::kPlanAndDispatch ? Op::kPlan : op, reason, stream);
  // With a stream nobody waits for the plan: when the others hear that it was refused here, they
  // have dispatched already, unless one launch makes both.
  if (op == Op::kPlanAndDispatch && call.stream != nullptr && do_peers_only_plan(number)) {
    refuse_one(Op::kDispatch, reason, stream);
  }
  return true;
}

uint32_t CudaExchange::refuse_one(Op op, std::string_view reason, cudaStream_t stream) {
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));  // then the GPU knows the call's number
  const uint32_t number = read_local().epoch + 1;
  refusals_->post(number, reason);
  launch_refusal(view_, op, stream);
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));
  return number;
}

// The handshakes of a call stay for two calls.
bool CudaExchange::do_peers_only_plan(uint32_t epoch) const {
  const cudaStream_t stream = own_->stream.get();
  for (uint32_t peer = 0; peer < control_map_.num_ranks; ++peer) {
    DeviceHandshake word;
    const std::byte* from = memory_->control().data + control_map_.word_offset(epoch, peer);
    WEFT_CUDA(context_, cudaMemcpyAsync(&word, from, sizeof word, cudaMemcpyDeviceToHost, stream));
    WEFT_CUDA(context_, cudaStreamSynchronize(stream));
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
  if (!is_capturing(stream, context_)) {
    WEFT_CUDA(context_, cudaEventRecord(own_->last_call.get(), stream));
  }
}

// Once this rank's part of the call has ended, in whatever stream it was replayed, and what is
// queued behind it. Nobody else is waited for: a peer on the same GPU may wait for this rank.
void CudaExchange::clear_fault(uint32_t epoch) {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const auto deadline = std::chrono::steady_clock::now() + 2 * settings_.timeout;  // of its waits
  WEFT_CUDA(context_, cudaEventSynchronize(own_->last_call.get()));
  while (static_cast<int32_t>(read_local().epoch - epoch) < 0 &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  *own_->fault.get() = {};  // first: once calls may go on, the next fault may come
  const cudaStream_t stream = own_->stream.get();
  WEFT_CUDA(context_, cudaMemsetAsync(&own_->local.get()->stopped, 0, sizeof(StopState), stream));
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));
}

void CudaExchange::throw_fault() {
  FaultRecord record = *own_->fault.get();
  const auto give_up = [&](ErrorCode code, const std::string& problem) {
    try {
      raise_error(code, context_, problem);
    } catch (const Error&) {
      broken_ = std::current_exception();
      throw;
    }
  };
  const PeerState state =
      record.kind == FaultKind::kTimeout ? memory_->peer_state(record.peer) : PeerState::kAlive;
  const int refuser = record.kind == FaultKind::kRefused ? record.peer : -1;
  RankView named = view_;
  if (!rank_names_.empty()) {
    named.rank = rank_names_[static_cast<size_t>(view_.rank)];
    record.peer = record.peer < 0 ? -1 : rank_names_[static_cast<size_t>(record.peer)];
  }
  if (record.kind == FaultKind::kTimeout) {
    if (record.waiting_for != WaitFor::kGrid && state != PeerState::kAlive) {
      give_up(
          ErrorCode::kPeerFailed,
          fmt::format(
              "{}: rank {} {} during call {}",
              op_name(record.op),
              record.peer,
              state == PeerState::kDied ? "died" : "left the exchange",
              call_number(view_, record.epoch)
          )
      );
    }
    ControlSurvey survey;
    try {
      survey = survey_control(record.epoch);
    } catch (const Error& error) {  // the timeout is what matters
      log(LogLevel::kDebug, "exchange: {}", error.what());
    }
    give_up(ErrorCode::kTimeout, fault_text(record, named, survey));
  }
  if (record.kind == FaultKind::kStranger || record.kind == FaultKind::kUnmapped) {
    give_up(ErrorCode::kInternal, fault_text(record, named));
  }
  ControlSurvey survey;
  if (refuser >= 0) {
    survey.refusal = refusals_->reason(refuser, record.epoch);
  }
  clear_fault(record.epoch);  // nothing was harmed: all ranks gave the call up, and count it
  raise_error(ErrorCode::kInvalidArgument, context_, fault_text(record, named, survey));
}

// Reads by a copy, which takes another way than the kernel that failed.
ControlSurvey CudaExchange::survey_control(uint32_t epoch) const {
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  const cudaStream_t stream = own_->stream.get();
  const auto copy = [&](void* to, uint64_t offset, uint64_t bytes) {
    const std::byte* from = memory_->control().data + offset;
    WEFT_CUDA(context_, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  };
  ControlSurvey survey;
  survey.words.resize(static_cast<size_t>(view_.num_ranks));
  const uint64_t first = sizeof(uint32_t) * control_map_.signals().word(epoch, 0);
  copy(survey.words.data(), first, sizeof(uint32_t) * survey.words.size());
  copy(&survey.stamp, control_map_.stamp_offset(), sizeof survey.stamp);
  WEFT_CUDA(context_, cudaStreamSynchronize(stream));
  return survey;
}

}  // namespace weft
