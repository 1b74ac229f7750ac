// SPDX-License-Identifier: Apache-2.0
// combine on a GPU: one kernel, through this rank's staging; or the steps of a call by copy engines
// (copies_cuda.cpp). Previous in the data flow: the caller's experts; next: kernels/combine.cu.
#include <algorithm>

#include "exchange/exchange_cuda.hpp"
#include "exchange/validate.hpp"

namespace weft {

void CudaExchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const PlanData& shape = plan.header();
  run_call(DeviceOp::kCombine, call, [&](cudaStream_t stream) {
    Validator{context, settings, id}.combine(shape, in, out);
    check_aligned("combine", "rows", in.rows);
    check_aligned("combine", "x", out.x);

    CombineLaunch launch;
    launch.me = view;
    launch.plan = view_of(shape);
    launch.rows = in.rows.data;
    launch.row_weights = reinterpret_cast<const float*>(in.weights.data);
    launch.source_weights = reinterpret_cast<const float*>(in.source_weights.data);
    launch.has_source_weights = in.scale == CombineScale::kSourceWeights;
    launch.out = out.x.data;
    launch.out_weights = reinterpret_cast<float*>(out.weights.data);
    launch.dtype = in.rows.dtype;
    launch.row_bytes = in.rows.row_bytes();
    launch.topk = shape.shape.topk;
    launch.from_map = shape.shape.from_map;
    launch.one_row = shape.shape.options.layout == Layout::kRankMajor;
    launch.scale = in.scale;
    launch.mover = mover();

    launch.copied.rows = {
        .row_bytes = launch.row_bytes,
        .weight_bytes = in.weights.is_given() ? settings.max_topk * int64_t{sizeof(float)} : 0};
    // Weights of the tokens' ranks would have to be there first.
    const bool is_copied = !launch.has_source_weights && launch.dtype != DType::kFloat32 &&
                           goes_by_copies(launch.copied.rows, call, stream);
    const int64_t signature[] = {
        0,
        static_cast<int64_t>(in.rows.dtype),
        launch.row_bytes,
        static_cast<int64_t>(in.scale),
        in.weights.is_given(),
        is_copied};
    std::copy(std::begin(signature), std::end(signature), launch.signature);
    is_copied ? combine_by_copies(shape, launch, call, stream)
              : combine_by_stores(shape, launch, call, stream);
    set_launched(stream);
    ++counters.num_combines;
    counters.num_copied += is_copied ? 1 : 0;
  });
}

void CudaExchange::combine_by_stores(
    const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  const int64_t per_token = std::min(view.num_ranks, plan.shape.topk);
  const int64_t rows = std::max<int64_t>(settings.max_tokens, 1) * per_token;
  const PeerRegion& area = staging_of(static_cast<uint64_t>(rows * launch.row_bytes), stream);
  launch.staging = {.region = area.region, .offset = 0};
  launch.staged = area.data;
  // Weights have one place there, for one of their two ways.
  launch.is_early = launch.row_bytes <= control_map.early_row_bytes &&
                    !(launch.has_source_weights && launch.copied.rows.weight_bytes > 0);

  const int num_sms = sms_of(call);
  RoleBlocks blocks = tuning.of(
      {.op = TunedOp::kCombine,
       .num_ranks = view.num_ranks,
       .row_bytes = launch.row_bytes,
       .num_sms = num_sms,
       .num_senders = call.num_senders}
  );
  if (launch.is_early && call.num_senders == 0) {
    const int64_t tokens = plan.shape.num_tokens;
    const int at_once = sums_at_once(launch.mover, launch.row_bytes, tokens);
    blocks = blocks_of_short_combine(num_sms, tokens, at_once).value_or(blocks);
  }
  launch.num_reduce = blocks.first;
  launch.num_sum = blocks.second;
  launch_combine(launch, stream);
}

void CudaExchange::combine_by_copies(
    const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  launch.copied = next_copies(launch.copied.rows);
  launch.staging = copied_address(launch.copied);
  launch.num_reduce = sms_of(call);
  launch.num_sum = launch.num_reduce;
  launch_combine_pack(launch, stream);
  queue_copies(launch.copied, plan.num_received, settings.max_tokens, stream);
  launch_combine_sum(launch, stream);
}

}  // namespace weft
