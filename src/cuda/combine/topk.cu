// SPDX-License-Identifier: Apache-2.0
// combine on a GPU with SumOrder::kTopk, one launch whose blocks have the two roles of topk.cuh.
// Before: combine/call.cpp; after: the caller.
#include "cuda/combine/row_pipeline.cuh"
#include "cuda/combine/topk.cuh"

namespace weft {
namespace {

template <class Element, bool kScaled>
__global__ void __launch_bounds__(kRoleThreads, 1)
    combine_topk(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  const int block = static_cast<int>(blockIdx.x);
  const bool is_signaller = warp_in_block() == kMoverWarps;
  const int warps = team_warps(call.payload.row_bytes, call.plan.header()->num_tokens);
  const bool is_open = begin_call(setup, call);
  if (is_open && block >= call.num_reduce) {
    const Team team = make_team(warps, block - call.num_reduce, call.num_sum);
    if (!is_signaller) {
      TopkSum<kScaled> source(call, setup, team);
      sum_rows_vector<Element, kScaled>(source, slice_of(team, call.payload.row_bytes, kSumPiece));
    }
  } else if (is_open) {
    const Team team = make_team(warps, block, call.num_reduce);
    TopkReturn rows(call, setup, progress, team);
    if (is_signaller) {
      rows.run_signals(kMoverWarps / warps);
    } else {
      rows.run(slice_of(team, call.payload.row_bytes, kSumPiece));
    }
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
}

CombineKernel kernel_of(bool is_scaled, DType dtype) {
  return with_element(dtype, [&]<class Element>(Element) -> CombineKernel {
    return {is_scaled ? combine_topk<Element, true> : combine_topk<Element, false>, kRoleThreads};
  });
}

}  // namespace

void prepare_topk_combine() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool is_scaled : {false, true}) {
      prepare(kernel_of(is_scaled, dtype));
    }
  }
}

void launch_topk_combine(const CombineLaunch& call, cudaStream_t stream) {
  const CombineKernel kernel = kernel_of(call.scale != CombineScale::kNone, call.payload.dtype);
  launch(kernel, call.num_reduce + call.num_sum, call, stream);
}

}  // namespace weft
