// SPDX-License-Identifier: Apache-2.0
// combine on a GPU with sums that travel coded (CombineInput::wire): the two roles of combine.cu,
// also in a group of one rank, through registers. All of a rank's sums are coded, those of its own
// tokens too, so that the result does not depend on where an expert lives. Before:
// combine/call.cpp; after: the caller.
#include "cuda/combine/coded_rows.cuh"
#include "cuda/combine/reduce.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

__device__ __forceinline__ ElementSpan span_of(const Team& team, int64_t row_bytes) {
  const int groups =
      static_cast<int>(row_bytes) / static_cast<int>(sizeof(uint16_t)) / kQuantiseGroup;
  return {
      groups * team.warp / team.warps * kQuantiseGroup,
      groups * (team.warp + 1) / team.warps * kQuantiseGroup};
}

// The roles of combine with coded rows on the way.
template <bool kScaled>
class CodingReduce : public CombineReduce<kScaled, false> {
 public:
  using Base = CombineReduce<kScaled, false>;
  __device__ CodingReduce(
      const CombineLaunch& call, const CallSetup& setup, TeamProgress& progress, const Team& team
  )
      : Base(call, setup, progress, team), wire_bytes_(call.payload.wire_bytes) {}

  [[nodiscard]] __device__ __forceinline__ std::byte* out(int source, int32_t row) const {
    return Base::out(source, 0) + row * wire_bytes_;
  }

 private:
  int64_t wire_bytes_;
};

class DecodingSum : public CombineSum<false> {
 public:
  __device__ DecodingSum(const CombineLaunch& call, const CallSetup& setup, const Team& team)
      : CombineSum<false>(call, setup, team),
        wire_bytes_(call.payload.wire_bytes),
        out_bytes_(call.codes_output ? call.payload.wire_bytes : call.payload.row_bytes) {}

  [[nodiscard]] __device__ __forceinline__ const std::byte* row(int32_t index) const {
    return CombineSum<false>::row(0) + index * wire_bytes_;
  }
  [[nodiscard]] __device__ __forceinline__ std::byte* out(int source, int32_t row) const {
    return CombineSum<false>::out(source, 0) + row * out_bytes_;
  }

 private:
  int64_t wire_bytes_;
  int64_t out_bytes_;
};

// Sums all items of a team's source, as sum_rows_vector() does.
template <bool kScaled, class From, class To, class Source>
__device__ void sum_coded_rows(
    Source& source, const From& from, const To& to, const ElementSpan& span
) {
  const ItemShape& shape = source.shape();
  uint32_t finished = 0;
  for (auto at = source.first();; at = source.after(at)) {
    const SumItem item = source.resolve(source.load(at));
    if (!item.is_there || !source.wait(item)) {
      return;
    }
    for (int entry = 0; entry < item.count; ++entry) {
      const uint32_t used = entry_bits(shape, item.used, entry);
      std::byte* const out = source.out(item.source, __shfl_sync(kAllLanes, item.out_row, entry));
      if (used == 0 && !Source::kStoresEmpty) {
        continue;
      }
      for (int first = span.first; first < span.last; first += kPieceElements) {
        uint32_t left = used;
        const auto next = [&](float& scale) {
          const int position = entry * shape.width + __ffs(static_cast<int>(left)) - 1;
          left &= left - 1;
          const int step = position / kWarpLanes;
          scale = __shfl_sync(kAllLanes, pick(item.scale, step), position);
          return source.row(__shfl_sync(kAllLanes, pick(item.row, step), position));
        };
        add_entry<kScaled>(from, to, {first, span.last}, __popc(used), out, next);
      }
    }
    source.finish(item.source, item.chunk, item.count, finished++);
  }
}

template <Wire kWire, bool kScaled>
__global__ void __launch_bounds__(kRoleThreads, 1)
    combine_coded(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  const int block = static_cast<int>(blockIdx.x);
  const bool is_signaller = warp_in_block() == kMoverWarps;
  const int warps = team_warps(call.payload.row_bytes, call.plan.header()->num_tokens);
  const CodedRows<kWire> coded = {static_cast<int32_t>(call.payload.row_bytes / sizeof(uint16_t))};
  bool is_open = begin_call(setup, call, call.is_eager);
  if (block >= call.num_reduce) {
    const Team team = make_team(warps, block - call.num_reduce, call.num_sum);
    DecodingSum source(call, setup, team);
    if (is_open && !is_signaller) {
      source.begin();
    }
    is_open = call.is_eager ? accept_peers(setup, call.me) : is_open;
    if (is_open && !is_signaller) {
      const ElementSpan span = span_of(team, call.payload.row_bytes);
      if (call.codes_output) {
        sum_coded_rows<false>(source, coded, coded, span);
      } else {
        sum_coded_rows<false>(source, coded, PlainRows(), span);
      }
    }
  } else if (is_open) {
    const Team team = make_team(warps, block, call.num_reduce);
    CodingReduce<kScaled> source(call, setup, progress, team);
    if (is_signaller) {
      source.run_signals(kMoverWarps / warps);
    } else if (source.is_open()) {
      const ElementSpan span = span_of(team, call.payload.row_bytes);
      sum_coded_rows<kScaled>(source, PlainRows(), coded, span);
    }
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
}

Kernel<CombineLaunch> kernel_of(Wire wire, bool is_scaled) {
  if (wire == Wire::kFp8) {
    return {
        is_scaled ? combine_coded<Wire::kFp8, true> : combine_coded<Wire::kFp8, false>,
        kRoleThreads};
  }
  return {
      is_scaled ? combine_coded<Wire::kLogFmt10, true> : combine_coded<Wire::kLogFmt10, false>,
      kRoleThreads};
}

}  // namespace

void prepare_coded_combine() {
  for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
    for (const bool is_scaled : {false, true}) {
      prepare(kernel_of(wire, is_scaled));
    }
  }
}

void launch_coded_combine(const CombineLaunch& call, cudaStream_t stream) {
  const bool is_scaled = call.scale != CombineScale::kNone;
  const auto kernel = kernel_of(call.payload.wire, is_scaled);
  launch(kernel, call.num_reduce + call.num_sum, call, stream);
}

}  // namespace weft
