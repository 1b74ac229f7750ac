// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU: decides where this rank's rows shall be written, then queues one kernel; or
// the steps of a call by copy engines (copy_engines/copies.cpp); or, for few tokens, plan and
// dispatch in one launch, or in one that sends and one for the rest. Previous in the data flow:
// plan/call.cpp, or the router; next: dispatch.cu, or fused.cu.
#include <algorithm>

#include "call/validate.hpp"
#include "cuda/exchange/exchange.hpp"
#include "plan/build.hpp"

namespace weft {
namespace {

// Returns the most arrivals that this rank can get. Without a budget each has an output row.
int64_t most_arrivals(const PlanData& plan, int64_t max_tokens) {
  const int64_t all = max_tokens * plan.shape.num_ranks;
  return plan.shape.options.row_budget || plan.shape.options.layout == Layout::kExpertStrided
             ? all
             : std::min(all, plan.num_rows);
}

// Returns how many blocks share each rank's tokens: one per 64 tokens, a step of each of its warps,
// within a quarter of all blocks.
int plan_parts(int64_t max_tokens, int num_ranks, int num_blocks) {
  constexpr int64_t kPartTokens = 64;
  const auto wanted = static_cast<int>((max_tokens + kPartTokens - 1) / kPartTokens);
  return std::max(1, std::min(wanted, num_blocks / 4 / num_ranks));
}

void launch_whole(const RoutedDispatchLaunch& call, cudaStream_t stream) {
  launch_routed_dispatch(call, CallPart::kAll, stream);
}

}  // namespace

void CudaExchange::prepare_rows(
    RowsLaunch& launch, const PlanData& plan, const PayloadFormat& payload
) const {
  launch.me = view_;
  launch.plan = view_of(plan);
  launch.payload = payload;
  launch.topk = plan.shape.topk;
  launch.from_map = plan.shape.from_map;
  launch.one_row = plan.shape.options.layout == Layout::kRankMajor;
  launch.copied.rows = copied_rows(payload);
  launch.mover = payload.is_quantised() ? Mover::kVector : settings_.mover;
}

DispatchLaunch CudaExchange::prepare_dispatch(
    const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
) const {
  Validator{context_, settings_, id_}.dispatch(plan, in, out);
  DispatchLaunch launch;
  prepare_rows(launch, plan, payload_of(in, out, settings_.max_topk));
  launch.x = in.x.data;
  launch.weights = reinterpret_cast<const float*>(in.weights.data);
  launch.scales = in.scales.data;
  launch.global_scale = reinterpret_cast<const float*>(in.global_scale.data);
  launch.out_rows = out.rows.data;
  launch.out_weights = reinterpret_cast<float*>(out.weights.data);
  launch.out_scales = out.scales.data;
  launch.out_sources = reinterpret_cast<int32_t*>(out.sources.data);
  launch.out_experts = reinterpret_cast<int64_t*>(out.experts.data);
  launch.out_counts = reinterpret_cast<int32_t*>(out.counts.data);
  launch.count_sums = reinterpret_cast<int32_t*>(out.count_sums.data);
  launch.num_rows = plan.num_rows;
  launch.scale_layout = out.scale_layout;
  if (out.scale_layout != ScaleLayout::kByRow) {
    launch.scale_stride = static_cast<int32_t>(plan.num_rows / plan.shape.num_local_experts());
  }
  launch.has_padding = !launch.one_row && plan.shape.options.pad_multiple > 1;
  return launch;
}

void CudaExchange::dispatch_by_plan(
    const Plan& plan,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call,
    bool is_second
) {
  const PlanData& shape = header_of(plan);
  const auto queue = [&](cudaStream_t stream) {
    DispatchLaunch launch = prepare_dispatch(shape, in, out);
    const bool is_copied = goes_by_copies(launch.copied.rows, call, stream);
    launch.signature = signature_of(
        {.op = Op::kDispatch,
         .number = call.number,
         .payload = launch.payload,
         .has_copies = is_copied}
    );
    is_copied ? dispatch_by_copies(shape, launch, call, stream)
              : dispatch_by_stores(shape, launch, call, stream);
    set_launched(stream);
    ++counters_.num_dispatches;
    counters_.num_copied += is_copied ? 1 : 0;
  };
  run_call(Op::kDispatch, call, queue, is_second);
}

void CudaExchange::dispatch_by_stores(
    const PlanData& plan, DispatchLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  const int64_t arrivals = most_arrivals(plan, settings_.max_tokens);
  const auto out_bytes = static_cast<uint64_t>(plan.num_rows * launch.payload.out_row_bytes());
  const auto region = memory_->find(launch.out_rows, out_bytes);
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
        .region = region->region, .offset = static_cast<uint64_t>(launch.out_rows - region->data)};
  }

  const RoleBlocks blocks = tuning_.of(
      {.op = Op::kDispatch,
       .num_ranks = view_.num_ranks,
       .row_bytes = launch.payload.row_bytes,
       .num_sms = sms_of(call),
       .num_senders = num_senders_,
       .is_one_role = view_.num_ranks == 1 || (launch.one_row && is_direct)}
  );
  launch.num_push = blocks.first;
  launch.num_fan_out = blocks.second;
  launch_and_keep(launch_dispatch, launch, stream);
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
  keep_none();
  launch_dispatch_pack(launch, stream);
  queue_copies(launch.copied, plan.num_sent, plan.shape.num_tokens, stream);
  launch_dispatch_fan_out(launch, stream);
}

bool CudaExchange::writes_alone(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const CallOptions& call
) const {
  const int replicas = options.balance.replicas;  // which is not checked yet
  const bool fits = replicas >= 0 && replicas <= kMostReplicas &&
                    (fused_replicas_ >> static_cast<uint32_t>(replicas) & 1U) != 0;
  const bool is_exact = !options.row_budget && options.layout != Layout::kExpertStrided;
  const bool may_tell = given_rows(options, 1) || (is_exact && replicas == 0);
  return fits && may_tell && !call.copy_engines && !routing.map.is_given() &&
         in.x.row_bytes() <= control_map_.eager_row_bytes && stored_scale_bytes(in) <= kScaleRoom;
}

BalancedDispatchLaunch CudaExchange::balanced(
    const RoutedDispatchLaunch& launch, const Balancing& balancing
) const {
  BalancedDispatchLaunch balanced;
  static_cast<RoutedDispatchLaunch&>(balanced) = launch;
  balanced.chosen_per_rank = plan_map().experts_per_rank;
  balanced.min_rows = static_cast<int32_t>(balancing.min_rows);
  balanced.block_rows = static_cast<int32_t>(balancing.block_rows);
  balanced.replica_rows = balancing.replica_rows;
  balanced.is_given = !balancing.placement.empty();
  balanced.plan.keeps_lost = balanced.is_given;
  std::ranges::transform(balancing.placement, balanced.placement, [](int32_t expert) {
    return static_cast<int16_t>(expert);
  });
  return balanced;
}

Plan CudaExchange::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  const PayloadFormat payload = payload_of(in, out, settings_.max_topk);
  if (!writes_alone(routing, options, in, call)) {
    const CallRepeats::Lock both(repeats_.get());  // one gate is behind them
    Plan plan = make_plan_of(Op::kPlanAndDispatch, routing, options, call);
    dispatch_by_plan(plan, in, out, call, /*is_second=*/true);
    return plan;
  }
  return run_call(Op::kPlanAndDispatch, call, [&](cudaStream_t stream) {
    auto [data, plan] = prepare_plan(routing, options, payload, call.number, stream);
    const bool waits = data.has_output_shape;
    if (waits) {
      ask_shape(plan);
      data.num_rows = out.rows.rows;  // for which there is room
    }
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
    // With replicas it is not known where rows go before all routing has come.
    const bool is_balanced = options.balance.replicas > 0;
    const bool is_later = call.receives_later && !is_balanced && !waits;
    if (is_balanced) {
      launch_balanced_dispatch(balanced(launch, options.balance), stream);
    } else if (is_later) {
      launch_routed_dispatch(launch, CallPart::kSend, stream);
    } else {
      launch_and_keep(launch_whole, launch, stream);
    }
    if (is_balanced || is_later || waits) {
      keep_none();
    }
    set_launched(stream);
    if (waits) {
      hear_shape(data, plan.plan.map, stream);
    }
    Plan made(std::make_shared<const PlanData>(std::move(data)));
    if (waits && made.num_rows() > out.rows.rows) {
      unplaced_ = Unplaced{made, payload};
    }
    if (is_later) {
      open_ = OpenCall{made, launch, is_capturing(stream, context_)};
    }
    ++counters_.num_plans;
    ++counters_.num_dispatches;
    return made;
  });
}

void CudaExchange::place_rows(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  const CudaDeviceGuard guard(settings_.device.index);
  WEFT_CHECK_ARG(
      context_, unplaced_ && &header_of(unplaced_->plan) == &header_of(plan), "{}", kNothingToPlace
  );
  const DispatchLaunch launch = prepare_dispatch(header_of(plan), in, out);
  WEFT_CHECK_ARG(
      context_,
      launch.payload == unplaced_->payload,
      "place_rows: what is to be placed is not what the call has sent"
  );
  const cudaStream_t stream = stream_of(call);
  launch_place_rows(launch, sms_of(call), stream);
  record_end(stream);
  unplaced_.reset();
  if (call.stream == nullptr) {
    wait_for(stream);
    const CallRepeats::Lock lock(repeats_.get());
    check_behind(stream);
  }
}

}  // namespace weft
