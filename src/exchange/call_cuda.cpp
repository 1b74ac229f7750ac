// SPDX-License-Identifier: Apache-2.0
// How a call on a GPU fails: what a kernel wrote to the fault record becomes an exception.
#include <fmt/format.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "exchange/exchange_cuda.hpp"

namespace weft {
namespace {

constexpr std::array<std::string_view, 4> kOpNames = {"call", "plan", "dispatch", "combine"};

std::string_view name_of(DeviceOp op) {
  return kOpNames.at(static_cast<size_t>(op));
}

// Field names of DeviceWord::signature, by operation, as the *_call_cuda.cpp files fill it.
std::string_view field_name(DeviceOp op, int field) {
  using Names = std::array<std::string_view, kDeviceSignatureFields>;
  static constexpr Names kPlan = {
      "layout", "pad_multiple", "expert_stride", "overflow", "topk", "map", "weights"};
  static constexpr Names kDispatch = {
      "plan (number of its call)", "dtype", "row bytes", "scale bytes", "weights", "quantise"};
  static constexpr Names kCombine = {
      "plan (number of its call)", "dtype", "row bytes", "scale", "weights"};
  const Names& names = op == DeviceOp::kPlan       ? kPlan
                       : op == DeviceOp::kDispatch ? kDispatch
                                                   : kCombine;
  return names.at(static_cast<size_t>(field));
}

std::string_view waited_for(WaitFor what) {
  switch (what) {
    case WaitFor::kWord:
      return "call word";
    case WaitFor::kRecords:
      return "records of the plan";
    case WaitFor::kSourceWeights:
      return "source weights";
    case WaitFor::kRows:
      return "rows";
    case WaitFor::kGrid:
      return "blocks of its own";
  }
  return "signal";
}

}  // namespace

void CudaExchange::check() {
  if (broken) {
    std::rethrow_exception(broken);
  }
  if (*static_cast<volatile FaultKind*>(&own->fault.get()->kind) != FaultKind::kNone) {
    std::atomic_thread_fence(std::memory_order_acquire);  // the record was written before its kind
    throw_fault();
  }
}

void CudaExchange::finish(cudaStream_t stream) {
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  check();
}

void CudaExchange::refuse(DeviceOp op, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  WEFT_CUDA(context, cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) {
    launch_refusal(view, op, stream);
    WEFT_CUDA(context, cudaStreamSynchronize(stream));
  }
}

void CudaExchange::throw_fault() {
  const FaultRecord record = *own->fault.get();
  const std::string_view op = name_of(record.op);
  const auto give_up = [&](ErrorCode code, const std::string& problem) {
    try {
      raise_error(code, context, problem);
    } catch (const Error&) {
      broken = std::current_exception();
      throw;
    }
  };
  if (record.kind == FaultKind::kTimeout) {
    const PeerState state = memory->peer_state(record.peer);
    if (record.waiting_for != WaitFor::kGrid && state != PeerState::kAlive) {
      give_up(
          ErrorCode::kPeerFailed,
          fmt::format(
              "{}: rank {} {} during call {}",
              op,
              record.peer,
              state == PeerState::kDied ? "died" : "left the exchange",
              record.epoch
          )
      );
    }
    give_up(
        ErrorCode::kTimeout,
        fmt::format(
            "{}: rank {} waited {} ms for {} of rank {} in call {} (seen {}, wanted {})",
            op,
            context.rank,
            settings.timeout.count(),
            waited_for(record.waiting_for),
            record.peer,
            record.epoch,
            record.seen,
            record.wanted
        )
    );
  }
  // Nothing was harmed on any rank: all of them gave the call up, and count it. Only this rank's
  // own work is waited for: a peer on the same GPU may wait for this rank already.
  const cudaStream_t stream = last_stream;
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  WEFT_CUDA(context, cudaMemsetAsync(&own->local.get()->stopped, 0, sizeof(StopState), stream));
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  *own->fault.get() = {};
  std::string problem;
  switch (record.kind) {
    case FaultKind::kRefused:
      problem = fmt::format("{}: rank {} refused the call", op, record.peer);
      break;
    case FaultKind::kBadIndex:
      problem = fmt::format(
          "{}: topk_idx[{}, {}] = {} is out of range (num_experts = {}, -1 = no route)",
          op,
          record.seen,
          record.what,
          record.wanted,
          settings.num_experts
      );
      break;
    case FaultKind::kTooMany:
      problem = fmt::format(
          "{}: map[{}] names more than {} experts (max_topk)", op, record.seen, record.wanted
      );
      break;
    default:
      if (record.what < 0) {
        problem = fmt::format(
            "{}: rank {} calls {} (all ranks make the same calls in the same order; this is call "
            "{})",
            op,
            record.peer,
            name_of(static_cast<DeviceOp>(record.seen)),
            record.epoch
        );
      } else {
        problem = fmt::format(
            "{}: {} = {} here and {} on rank {} (must be equal on all ranks)",
            op,
            field_name(record.op, record.what),
            record.wanted,
            record.seen,
            record.peer
        );
      }
  }
  raise_error(ErrorCode::kInvalidArgument, context, problem);
}

}  // namespace weft
