// SPDX-License-Identifier: Apache-2.0
// combine on a GPU, one launch whose blocks have two roles: the first sum the experts' rows of each
// arrival and send one row per arrival back to the token's rank (reduce.cuh), the others add up
// what has come back for this rank's tokens (sum.cuh). In a group of one rank there is one role
// (own.cuh). Before: combine/call.cpp; after: the caller.
#include <type_traits>

#include "cuda/combine/own.cuh"
#include "cuda/combine/reduce.cuh"
#include "cuda/combine/row_warps.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

// Returns the warps that share a row, without a look at the plan where tokens are few.
template <class Shape>
__device__ __forceinline__ int warps_of(const CombineLaunch& call) {
  constexpr bool kIsShort = std::is_same_v<Shape, OneEntry>;
  return team_warps(call.payload.row_bytes, kIsShort ? 0 : call.plan.header()->num_tokens);
}

template <class Shape, class Element, bool kScaled>
__global__ void __launch_bounds__(kRoleThreads, 1)
    combine_vector(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  const int block = static_cast<int>(blockIdx.x);
  const bool is_signaller = warp_in_block() == kMoverWarps;
  const int warps = warps_of<Shape>(call);
  bool is_open = begin_call(setup, call, call.is_eager);
  if (block >= call.num_reduce) {
    const Team team = make_team(warps, block - call.num_reduce, call.num_sum);
    CombineSum<false, Shape> source(call, setup, team);
    if (is_open && !is_signaller) {
      source.begin();
    }
    is_open = call.is_eager ? accept_peers(setup, call.me) : is_open;
    if (is_open && !is_signaller) {
      sum_rows_vector<Element, false>(source, slice_of(team, call.payload.row_bytes, kSumPiece));
    }
  } else if (is_open) {
    const Team team = make_team(warps, block, call.num_reduce);
    CombineReduce<kScaled, false, Shape> source(call, setup, progress, team);
    if (is_signaller) {
      source.run_signals(kMoverWarps / warps);
    } else if (source.is_open()) {
      sum_rows_vector<Element, kScaled>(source, slice_of(team, call.payload.row_bytes, kSumPiece));
    }
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
}

template <class Shape, class Element, bool kScaled>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    combine_bulk(const __grid_constant__ CombineLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stage_bytes[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ PipelineShared<Shape> pipelines;
  clear_progress(progress);
  init_pipelines(pipelines);
  const int block = static_cast<int>(blockIdx.x);
  const bool is_reduce = block < call.num_reduce;
  const int place = is_reduce ? block : block - call.num_reduce;
  const PipelineRole role = pipeline_role<Shape>();
  const RowStages stages = row_stages<Shape>(stage_bytes, call.payload.row_bytes, role.pipeline);
  const Team team = pipeline_team<Shape>(role, place, is_reduce ? call.num_reduce : call.num_sum);
  bool is_open = begin_call(setup, call, call.is_eager);
  if (!is_reduce) {
    CombineSum<false> source(call, setup, team);
    if (is_open && role.adder >= 0) {
      source.begin();
    }
    is_open = call.is_eager ? accept_peers(setup, call.me) : is_open;
    if (is_open && role.is_loader) {
      load_rows(source, role.pipeline, stages, pipelines);
    } else if (is_open && role.adder >= 0) {
      add_rows<Element, false>(source, role, stages, pipelines);
    }
  } else if (is_open) {
    CombineReduce<kScaled, false> source(call, setup, progress, team);
    if (role.is_loader) {
      load_rows(source, role.pipeline, stages, pipelines);
    } else if (role.adder >= 0) {
      add_rows<Element, kScaled>(source, role, stages, pipelines);
    } else {
      source.run_signals(Shape::kPipelines);
    }
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
#endif
}

template <class Shape, class Element, bool kScaled, bool kByChoice>
__global__ void __launch_bounds__(kRoleThreads, 1)
    combine_own_vector(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  const int warps = warps_of<Shape>(call);
  if (begin_call(setup, call) && warp_in_block() < kMoverWarps) {
    const Team team = make_team(warps, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    CombineOwn<kScaled, kByChoice, Shape> source(call, team);
    sum_rows_vector<Element, kScaled>(source, slice_of(team, call.payload.row_bytes, kSumPiece));
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
}

template <class Shape, class Element, bool kScaled, bool kByChoice>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    combine_own_bulk(const __grid_constant__ CombineLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stage_bytes[];
  __shared__ CallSetup setup;
  __shared__ PipelineShared<Shape> pipelines;
  init_pipelines(pipelines);
  const PipelineRole role = pipeline_role<Shape>();
  const RowStages stages = row_stages<Shape>(stage_bytes, call.payload.row_bytes, role.pipeline);
  const Team team =
      pipeline_team<Shape>(role, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (begin_call(setup, call)) {
    CombineOwn<kScaled, kByChoice> source(call, team);
    if (role.is_loader) {
      load_rows(source, role.pipeline, stages, pipelines);
    } else if (role.adder >= 0) {
      add_rows<Element, kScaled>(source, role, stages, pipelines);
    }
  }
  finish_call</*kRenewsApart=*/false>(call.me, setup.epoch);
#endif
}

RowPath path_of(const CombineLaunch& call) {
  return call.is_short ? RowPath::kFewTokens : path_of(call.mover, call.payload.row_bytes);
}

// Rows that a kernel adds: those of all ranks, or only this rank's, in either order.
enum class Rows : uint8_t { kOfPeers, kOwn, kOwnByChoice };
constexpr Rows kAllRows[] = {Rows::kOfPeers, Rows::kOwn, Rows::kOwnByChoice};

Rows rows_of(const CombineLaunch& call) {
  return !is_alone(call) ? Rows::kOfPeers : call.is_by_choice ? Rows::kOwnByChoice : Rows::kOwn;
}

CombineKernel kernel_of(RowPath path, bool is_scaled, DType dtype, Rows rows) {
  return with_element(dtype, [&]<class Element>(Element) -> CombineKernel {
    const auto with_scale = [&](const auto& pick) {
      return is_scaled ? pick(std::true_type{}) : pick(std::false_type{});
    };
    const auto bulk = [&]<class Shape>(Shape) -> CombineKernel {
      const auto pick = [&](auto scaled) {
        return rows == Rows::kOfPeers ? combine_bulk<Shape, Element, scaled.value>
               : rows == Rows::kOwn   ? combine_own_bulk<Shape, Element, scaled.value, false>
                                      : combine_own_bulk<Shape, Element, scaled.value, true>;
      };
      return {with_scale(pick), Shape::kThreads, kRowStageBytes};
    };
    const auto vector = [&]<class Shape>(std::type_identity<Shape>) -> CombineKernel {
      const auto pick = [&](auto scaled) {
        return rows == Rows::kOfPeers ? combine_vector<Shape, Element, scaled.value>
               : rows == Rows::kOwn   ? combine_own_vector<Shape, Element, scaled.value, false>
                                      : combine_own_vector<Shape, Element, scaled.value, true>;
      };
      return {with_scale(pick), kRoleThreads};
    };
    return path == RowPath::kFewTokens
               ? vector(std::type_identity<OneEntry>())
               : with_shape(path, bulk, [&] { return vector(std::type_identity<ItemShape>()); });
  });
}

}  // namespace

int sums_at_once(const CombineLaunch& call, int64_t num_tokens) {
  const auto bulk = []<class Shape>(Shape) { return Shape::kPipelines; };
  return with_shape(path_of(call), bulk, [&] {
    return kMoverWarps / team_warps(call.payload.row_bytes, num_tokens);
  });
}

void prepare_combine() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool is_scaled : {false, true}) {
      for (const RowPath path : kRowPaths) {
        for (const Rows rows : kAllRows) {
          prepare(kernel_of(path, is_scaled, dtype, rows));
        }
      }
    }
  }
}

void launch_combine(const CombineLaunch& call, cudaStream_t stream) {
  const RowPath path = path_of(call);
  const bool is_scaled = call.scale != CombineScale::kNone;
  const CombineKernel kernel = kernel_of(path, is_scaled, call.payload.dtype, rows_of(call));
  launch(kernel, call.num_reduce + call.num_sum, call, stream);
}

}  // namespace weft
