// SPDX-License-Identifier: Apache-2.0
// Plan and dispatch on GPUs of one domain in one launch, where tokens are few. Previous in the data
// flow: the router; next: fused.cu.
#include <algorithm>

#include "cuda/exchange/exchange.hpp"
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
bool can_be_eager(
    const DeviceControlMap& map,
    const Routing& routing,
    const PlanOptions& options,
    const PayloadFormat& payload,
    const CallOptions& call
) {
  return !call.copy_engines && !routing.map.is_given() && given_rows(options, 1).has_value() &&
         payload.row_bytes <= map.eager_row_bytes && payload.staged_scale_bytes() <= kScaleRoom;
}

}  // namespace

Plan CudaExchange::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  const PayloadFormat payload = payload_of(in, out, settings_.max_topk);
  if (!can_fuse_ || !can_be_eager(control_map_, routing, options, payload, call)) {
    Plan plan = make_plan_of(Op::kPlanAndDispatch, routing, options, call);
    dispatch(plan, in, out, call);
    return plan;
  }
  return run_call(Op::kPlanAndDispatch, call, [&](cudaStream_t stream) {
    auto [data, plan] = prepare_plan(routing, options, payload, stream);
    RoutedDispatchLaunch launch;
    launch.dispatch = prepare_dispatch(data, in, out);
    launch.dispatch.place = Place::kEager;
    launch.dispatch.topk_idx = plan.topk_idx;
    launch.dispatch.index_bytes = plan.index_bytes;
    launch.dispatch.num_tokens = plan.num_tokens;
    launch.num_blocks = sms_of(call);
    launch.plan = plan;
    launch.plan.num_parts = plan_parts(settings_.max_tokens, view_.num_ranks, launch.num_blocks);
    const int jobs = 1 + view_.num_ranks * launch.plan.num_parts;
    launch.plan.num_blocks = std::min(jobs, launch.num_blocks - 1);
    launch_routed_dispatch(launch, stream);
    set_launched(stream);
    ++counters_.num_plans;
    ++counters_.num_dispatches;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

}  // namespace weft
