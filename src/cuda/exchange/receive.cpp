// SPDX-License-Identifier: Apache-2.0
// Queues the second half of a call that has only sent (CallOptions::receives_later), when asked to
// or when the next call begins. Before: dispatch/call.cpp, combine/call.cpp.
#include <variant>

#include "cuda/exchange/exchange.hpp"

namespace weft {

void CudaExchange::receive(const Plan& plan, const CallOptions& call) {
  const CudaDeviceGuard guard(settings_.device.index);
  if (!is_open(plan)) {
    return;
  }
  const cudaStream_t stream = stream_of(call);
  {
    const CallRepeats::Lock lock(repeats_.get());
    receive_open(stream);
  }
  if (call.stream == nullptr) {
    wait_for(stream);
    const CallRepeats::Lock lock(repeats_.get());
    check_behind(stream);
  }
}

void CudaExchange::receive_open(cudaStream_t stream) {
  if (!open_) {
    return;
  }
  if (const bool was_captured = open_->is_captured;
      was_captured != is_capturing(stream, context_)) {
    if (was_captured) {  // it is sent by replays only
      open_.reset();
    }
    WEFT_RAISE(
        context_,
        ErrorCode::kUnsupported,
        "receive: a call was sent {} a CUDA graph's capture and is received {} it (expected both "
        "inside, or both outside)",
        was_captured ? "inside" : "outside",
        was_captured ? "outside" : "inside"
    );
  }
  if (const auto* combine = std::get_if<CombineLaunch>(&open_->launch)) {
    running_op_ = Op::kCombine;
    launch_combine_by_route(*combine, CallPart::kReceive, stream);
  } else {
    running_op_ = Op::kPlanAndDispatch;
    launch_routed_dispatch(
        std::get<RoutedDispatchLaunch>(open_->launch), CallPart::kReceive, stream
    );
  }
  record_end(stream);
  open_.reset();
  is_plan_alone_ = false;
  close_calls(stream);
}

}  // namespace weft
