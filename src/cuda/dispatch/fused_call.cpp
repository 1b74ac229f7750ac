// SPDX-License-Identifier: Apache-2.0
// Plan and dispatch on GPUs of one domain in one launch, where tokens are few. Previous in the data
// flow: the router; next: kernels/dispatch_routed.cu.
#include <algorithm>

#include "exchange/exchange_cuda.hpp"
#include "exchange/signature_text.hpp"
#include "kernels/staged_rows.hpp"
#include "plan/build.hpp"

namespace weft {
namespace {

// Blocks among which each rank's tokens are shared: as many as get a step of each of their warps,
// within a quarter of all blocks.
int plan_parts(int64_t max_tokens, int num_ranks, int num_blocks) {
  constexpr int64_t kPartTokens = 64;
  const auto wanted = static_cast<int>((max_tokens + kPartTokens - 1) / kPartTokens);
  return std::max(1, std::min(wanted, num_blocks / 4 / num_ranks));
}

// Decided by what all ranks pass alike.
bool goes_early(
    const DeviceControlMap& map,
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  const int64_t scale_bytes = out.scales.is_given() ? out.scales.row_bytes() : 0;
  return !call.copy_engines && !routing.map.is_given() && given_rows(options, 1).has_value() &&
         in.x.row_bytes() <= map.early_row_bytes && staged_scale_bytes(scale_bytes) <= kScaleRoom;
}

}  // namespace

Plan CudaExchange::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  if (!can_plan_beside || !goes_early(control_map, routing, options, in, out, call)) {
    return plan_then_dispatch(routing, options, in, out, call);
  }
  return run_call(DeviceOp::kPlan, call, [&](cudaStream_t stream) {
    auto [data, plan] = prepare_plan(routing, options, stream);
    RoutedDispatchLaunch launch;
    launch.dispatch = prepare_dispatch(data, in, out);
    launch.dispatch.place = DevicePlace::kEarly;
    launch.dispatch.topk_idx = plan.topk_idx;
    launch.dispatch.index_bytes = plan.index_bytes;
    launch.dispatch.num_tokens = plan.num_tokens;
    launch.num_blocks = sms_of(call);
    launch.plan = plan;
    launch.plan.num_parts = plan_parts(settings.max_tokens, view.num_ranks, launch.num_blocks);
    const int jobs = 1 + view.num_ranks * launch.plan.num_parts;
    launch.plan.num_blocks = std::min(jobs, launch.num_blocks - 1);
    // Behind the plan's own fields.
    const int64_t rows[] = {
        routed_rows_field(in.x.dtype, in.quantise, in.weights.is_given()),
        launch.dispatch.row_bytes,
        launch.dispatch.scale_bytes};
    std::copy(std::begin(rows), std::end(rows), std::end(launch.plan.signature) - std::size(rows));
    launch_routed_dispatch(launch, stream);
    set_launched(stream);
    ++counters.num_plans;
    ++counters.num_dispatches;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

// With a stream nobody waits for the plan: when the others hear that it was refused here, they have
// dispatched already.
Plan CudaExchange::plan_then_dispatch(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  const auto make = [&] {
    try {
      return make_plan(routing, options, call);
    } catch (const Error&) {
      if (call.stream != nullptr && !broken) {
        const CudaDeviceGuard guard(settings.device.index);
        refuse(DeviceOp::kDispatch, static_cast<cudaStream_t>(call.stream));
      }
      throw;
    }
  };
  Plan plan = make();
  dispatch(plan, in, out, call);
  return plan;
}

// As many calls as the others' arguments most likely make of it.
void CudaExchange::refuse_routed(const Error& reason, const CallOptions& call) {
  if (can_plan_beside && !call.copy_engines) {
    State::refuse_routed(reason, call);
    return;
  }
  try {
    static_cast<void>(plan_then_dispatch({}, {}, {}, {}, call));
  } catch (const Error&) {  // as wanted; the caller has another reason
  }
}

}  // namespace weft
