// SPDX-License-Identifier: Apache-2.0
// combine on a GPU: queues one kernel, through this rank's staging; or two, of which the first only
// sends; or the steps of a call by copy engines (copy_engines/copies.cpp). Previous in the data
// flow: the caller's experts; next: combine.cu.
#include <algorithm>

#include "call/validate.hpp"
#include "cuda/exchange/exchange.hpp"

namespace weft {
namespace {

void launch_both(const CombineLaunch& call, cudaStream_t stream) {
  launch_combine_by_route(call, CallPart::kSend, stream);
  launch_combine_by_route(call, CallPart::kReceive, stream);
}

}  // namespace

void CudaExchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  const PlanData& shape = header_of(plan);
  run_call(Op::kCombine, call, [&](cudaStream_t stream) {
    Validator{context_, settings_, id_}.combine(shape, in, out);

    CombineLaunch launch;
    prepare_rows(launch, shape, payload_of(in, settings_.max_topk));
    const bool is_coded = in.wire != Wire::kNone;
    launch.mover = is_coded ? Mover::kVector : launch.mover;
    launch.is_by_choice = shape.shape.options.order == SumOrder::kTopk;
    launch.reads_own = (launch.one_row || launch.is_by_choice) && !is_coded;
    launch.codes_output = codes_output(in, out);
    launch.rows = in.rows.data;
    launch.row_weights = reinterpret_cast<const float*>(in.weights.data);
    launch.source_weights = reinterpret_cast<const float*>(in.source_weights.data);
    launch.source_idx = in.source_idx.data;
    launch.index_bytes = static_cast<int32_t>(dtype_bytes(in.source_idx.dtype));
    launch.has_source_weights = in.scale == CombineScale::kSourceWeights;
    launch.out = out.x.data;
    launch.out_weights = reinterpret_cast<float*>(out.weights.data);
    launch.scale = in.scale;
    launch.ready = in.ready;
    const bool has_marks = in.ready.marks.is_given();
    const bool is_by_route =
        (call.receives_later || has_marks) && can_return_by_route(shape, launch);
    // Weights of the tokens' ranks would have to be there first; copies bring a row an arrival, as
    // it is.
    const bool is_copied = !is_coded && !launch.has_source_weights &&
                           in.rows.dtype != DType::kFloat32 && !launch.is_by_choice &&
                           goes_by_copies(launch.copied.rows, call, stream);
    launch.signature = signature_of(
        {.op = Op::kCombine,
         .number = call.number,
         .payload = launch.payload,
         .scale = in.scale,
         .has_copies = is_copied,
         .is_by_route = is_by_route}
    );
    if (has_marks && !is_by_route) {
      launch_await_marks(launch, stream);
    }
    is_by_route ? combine_by_route(plan, launch, call, stream)
    : is_copied ? combine_by_copies(shape, launch, call, stream)
                : combine_by_stores(shape, launch, call, stream);
    set_launched(stream);
    ++counters_.num_combines;
    counters_.num_copied += is_copied ? 1 : 0;
  });
}

void CudaExchange::combine_by_stores(
    const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  const int num_sms = sms_of(call);
  if (is_alone(launch)) {
    const int chunks = num_device_chunks(static_cast<int>(plan.shape.num_tokens));
    launch.is_short =
        picks_mover_ && plan.shape.num_tokens <= num_sms && is_short_call(plan.shape.num_tokens);
    launch.num_reduce = 0;
    launch.num_sum = std::clamp(chunks, 1, num_sms);
    launch_and_keep(launch_combine, launch, stream);
    return;
  }
  const int64_t per_token =
      launch.is_by_choice ? plan.shape.topk : std::min(view_.num_ranks, plan.shape.topk);
  const int64_t rows = std::max<int64_t>(settings_.max_tokens, 1) * per_token;
  const PeerRegion& area =
      staging_of(static_cast<uint64_t>(rows * launch.payload.wire_bytes), stream);
  launch.staging = {.region = area.region, .offset = 0};
  launch.staged = area.data;
  // Weights have one place there, for one of their two ways, and a token a row for each rank.
  launch.is_eager = !launch.is_by_choice &&
                    launch.payload.wire_bytes <= control_map_.eager_row_bytes &&
                    !(launch.has_source_weights && launch.payload.weight_bytes > 0);
  launch.is_short = picks_mover_ && launch.is_eager;

  RoleBlocks blocks = tuning_.of(
      {.op = Op::kCombine,
       .num_ranks = view_.num_ranks,
       .row_bytes = launch.payload.row_bytes,
       .num_sms = num_sms,
       .num_senders = num_senders_,
       .is_one_role = reads_own_rows(launch) && view_.num_ranks == 1,
       .one_row = launch.one_row}
  );
  if (launch.is_eager && num_senders_ == 0) {
    const int64_t tokens = plan.shape.num_tokens;
    const int at_once = sums_at_once(launch, tokens);
    blocks = blocks_of_short_combine(num_sms, tokens, at_once).value_or(blocks);
  }
  launch.num_reduce = blocks.first;
  launch.num_sum = blocks.second;
  const auto kernel = launch.payload.wire != Wire::kNone ? launch_coded_combine
                      : launch.is_by_choice              ? launch_topk_combine
                                                         : launch_combine;
  launch_and_keep(kernel, launch, stream);
}

bool CudaExchange::can_return_by_route(const PlanData& plan, const CombineLaunch& launch) const {
  return plan.shape.options.order == SumOrder::kRank && control_map_.has_route_rows &&
         launch.payload.row_bytes <= control_map_.eager_row_bytes && launch.has_source_weights &&
         launch.payload.weight_bytes == 0 && !launch.from_map && launch.payload.wire == Wire::kNone;
}

void CudaExchange::combine_by_route(
    const Plan& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  const bool has_marks = launch.ready.marks.is_given();
  // The kernels that write the rows need multiprocessors, too.
  const int most = has_marks ? std::max(1, num_gpu_sms_ / 2) : num_gpu_sms_;
  launch.num_reduce = std::min(call.num_sms > 0 ? call.num_sms : sms_of(call), most);
  launch.num_sum = sms_of(has_marks ? CallOptions{} : call);
  if (call.receives_later) {
    launch_combine_by_route(launch, CallPart::kSend, stream);
    keep_none();
    open_ = OpenCall{plan, launch, is_capturing(stream, context_)};
  } else {
    launch_and_keep(launch_both, launch, stream);
  }
}

void CudaExchange::combine_by_copies(
    const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
) {
  launch.copied = next_copies(launch.copied.rows);
  launch.staging = copied_address(launch.copied);
  launch.num_reduce = sms_of(call);
  launch.num_sum = launch.num_reduce;
  keep_none();
  launch_combine_pack(launch, stream);
  queue_copies(launch.copied, plan.num_received, settings_.max_tokens, stream);
  launch_combine_sum(launch, stream);
}

}  // namespace weft
