// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU: decides where this rank's rows shall be written, then one kernel; or the steps
// of a call by copy engines (copy_engines/copies.cpp). Previous in the data flow: plan/call.cpp;
// next: dispatch.cu.
#include <algorithm>

#include "call/validate.hpp"
#include "cuda/exchange/exchange.hpp"

namespace weft {
namespace {

// Most arrivals that this rank can get. Without a budget each has a row of the output.
int64_t most_arrivals(const PlanData& plan, int64_t max_tokens) {
  const int64_t all = max_tokens * plan.shape.num_ranks;
  return plan.shape.options.row_budget || plan.shape.options.layout == Layout::kExpertStrided
             ? all
             : std::min(all, plan.num_rows);
}

}  // namespace

DispatchLaunch CudaExchange::prepare_dispatch(
    const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
) const {
  Validator{context_, settings_, id_}.dispatch(plan, in, out);
  DispatchLaunch launch;
  launch.me = view_;
  launch.plan = view_of(plan);
  launch.x = in.x.data;
  launch.weights = reinterpret_cast<const float*>(in.weights.data);
  launch.scales = in.scales.data;
  launch.out_rows = out.rows.data;
  launch.out_weights = reinterpret_cast<float*>(out.weights.data);
  launch.out_scales = out.scales.data;
  launch.payload = payload_of(in, out, settings_.max_topk);
  launch.topk = plan.shape.topk;
  launch.from_map = plan.shape.from_map;
  launch.one_row = plan.shape.options.layout == Layout::kRankMajor;
  launch.has_padding = !launch.one_row && plan.shape.options.pad_multiple > 1;
  launch.mover = launch.payload.is_quantised() ? Mover::kVector : mover();
  return launch;
}

void CudaExchange::dispatch(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  const PlanData& shape = header_of(plan);
  run_call(Op::kDispatch, call, [&](cudaStream_t stream) {
    DispatchLaunch launch = prepare_dispatch(shape, in, out);
    launch.copied.rows = copied_rows(launch.payload);
    const bool is_copied = goes_by_copies(launch.copied.rows, call, stream);
    launch.signature =
        signature_of({.op = Op::kDispatch, .payload = launch.payload, .has_copies = is_copied});
    is_copied ? dispatch_by_copies(shape, launch, call, stream)
              : dispatch_by_stores(shape, out, launch, call, stream);
    set_launched(stream);
    ++counters_.num_dispatches;
    counters_.num_copied += is_copied ? 1 : 0;
  });
}

void CudaExchange::dispatch_by_stores(
    const PlanData& plan,
    const DispatchOutput& out,
    DispatchLaunch& launch,
    const CallOptions& call,
    cudaStream_t stream
) {
  const int64_t arrivals = most_arrivals(plan, settings_.max_tokens);
  const auto region = memory_->find(out.rows.data, static_cast<uint64_t>(out.rows.num_bytes()));
  const bool is_direct = region && memory_->is_reachable(*region);
  const auto row_bytes = static_cast<uint64_t>(is_direct ? 0 : launch.payload.out_row_bytes());
  const auto scale_bytes = static_cast<uint64_t>(launch.payload.staged_scale_bytes());
  const uint64_t scales_offset = static_cast<uint64_t>(arrivals) * row_bytes;
  const uint64_t staged = scales_offset + static_cast<uint64_t>(arrivals) * scale_bytes;
  if (staged > 0) {
    const PeerRegion& area = staging_of(staged, stream);
    launch.staged_rows = area.data;
    launch.staged_scales = area.data + scales_offset;
    launch.rows_target = {.region = area.region, .offset = 0};
    launch.scales_target = {.region = area.region, .offset = scales_offset};
  }
  if (is_direct) {
    launch.place = Place::kPrimarySlot;
    launch.rows_target = {
        .region = region->region, .offset = static_cast<uint64_t>(out.rows.data - region->data)};
  }

  const RoleBlocks blocks = tuning_.of(
      {.op = TunedOp::kDispatch,
       .num_ranks = view_.num_ranks,
       .row_bytes = launch.payload.row_bytes,
       .num_sms = sms_of(call),
       .num_senders = num_senders_,
       .is_one_role = launch.one_row && is_direct}
  );
  launch.num_push = blocks.first;
  launch.num_fan_out = blocks.second;
  launch_dispatch(launch, stream);
}

void CudaExchange::dispatch_by_copies(
    const PlanData& plan, DispatchLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  launch.copied = next_copies(launch.copied.rows);
  launch.place = Place::kCopied;
  launch.rows_target = copied_address(launch.copied);
  launch.scales_target = launch.rows_target;
  launch.num_push = sms_of(call);
  launch.num_fan_out = launch.num_push;
  launch_dispatch_pack(launch, stream);
  queue_copies(launch.copied, plan.num_sent, plan.shape.num_tokens, stream);
  launch_dispatch_fan_out(launch, stream);
}

}  // namespace weft
