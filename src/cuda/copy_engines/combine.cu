// SPDX-License-Identifier: Apache-2.0
// combine by copy engines: the kernels before and after the copies (copies.cpp). In the first all
// blocks have the pre-reduce role and pack sums for each peer in this rank's memory; in the second
// all have the sum role and add what copy engines have brought. Rows are loaded from and stored to
// this GPU's memory only. Before: combine/call.cpp; after: the caller.
#include "cuda/combine/reduce.cuh"
#include "cuda/combine/row_warps.cuh"
#include "cuda/combine/sum.cuh"
#include "cuda/copy_engines/call.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

constexpr int kThreads = kMoverWarps * kWarpLanes;  // of a vector kernel

// Runs either role: every warp makes the `Source` of its team.
template <class Element, class Source, class... More>
__device__ void run_vector(
    const CombineLaunch& call, const CallSetup& setup, const Team& team, More&... more
) {
  Source source(call, setup, more..., team);
  sum_rows_vector<Element, Source::kScales>(
      source, slice_of(team, call.payload.row_bytes, kSumPiece)
  );
}

__device__ Team this_team(const CombineLaunch& call) {
  const int warps = team_warps(call.payload.row_bytes, call.plan.header()->num_tokens);
  return make_team(warps, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <class Element, bool kScaled>
__global__ void __launch_bounds__(kThreads, 1)
    pack_vector(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;  // no warp looks at it
  if (begin_pack(setup, call)) {
    run_vector<Element, CombineReduce<kScaled, true>>(call, setup, this_team(call), progress);
  }
  finish_pack(setup, call.me, call.copied);
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1)
    sum_vector(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  if (begin_receive(setup, call)) {
    run_vector<Element, CombineSum<true>>(call, setup, this_team(call));
  }
  finish_receive(setup, call.me);
}

// Runs either role by pipelines: every warp makes the `Source` of its pipeline's team. No warp
// signals.
template <class Shape, class Element, class Source, class... More>
__device__ void run_bulk(
    const CombineLaunch& call,
    const CallSetup& setup,
    std::byte* stage_bytes,
    PipelineShared<Shape>& pipelines,
    More&... more
) {
  const PipelineRole role = pipeline_role<Shape>();
  const RowStages stages = row_stages<Shape>(stage_bytes, call.payload.row_bytes, role.pipeline);
  const auto blocks = static_cast<int>(gridDim.x);
  const Team team = pipeline_team<Shape>(role, static_cast<int>(blockIdx.x), blocks);
  Source source(call, setup, more..., team);
  if (role.is_loader) {
    load_rows(source, role.pipeline, stages, pipelines);
  } else if (role.adder >= 0) {
    add_rows<Element, Source::kScales>(source, role, stages, pipelines);
  }
}

template <class Shape, class Element, bool kScaled>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    pack_bulk(const __grid_constant__ CombineLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stage_bytes[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ PipelineShared<Shape> pipelines;
  init_pipelines(pipelines);
  if (begin_pack(setup, call)) {
    using Source = CombineReduce<kScaled, true>;
    run_bulk<Shape, Element, Source>(call, setup, stage_bytes, pipelines, progress);
  }
  finish_pack(setup, call.me, call.copied);
#endif
}

template <class Shape, class Element>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sum_bulk(const __grid_constant__ CombineLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stage_bytes[];
  __shared__ CallSetup setup;
  __shared__ PipelineShared<Shape> pipelines;
  init_pipelines(pipelines);
  if (begin_receive(setup, call)) {
    run_bulk<Shape, Element, CombineSum<true>>(call, setup, stage_bytes, pipelines);
  }
  finish_receive(setup, call.me);
#endif
}

struct Kernels {
  CombineKernel pack;
  CombineKernel sum;
};

template <class Element, bool kScaled>
Kernels kernels_of(RowPath path) {
  const auto bulk = []<class Shape>(Shape) -> Kernels {
    return {
        {pack_bulk<Shape, Element, kScaled>, Shape::kThreads, kRowStageBytes},
        {sum_bulk<Shape, Element>, Shape::kThreads, kRowStageBytes}};
  };
  return with_shape(path, bulk, []() -> Kernels {
    return {{pack_vector<Element, kScaled>, kThreads, 0}, {sum_vector<Element>, kThreads, 0}};
  });
}

// Returns the kernels for 16-bit elements.
Kernels kernels_of(RowPath path, bool is_scaled, DType dtype) {
  if (dtype == DType::kBFloat16) {
    return is_scaled ? kernels_of<BFloat16, true>(path) : kernels_of<BFloat16, false>(path);
  }
  return is_scaled ? kernels_of<Float16, true>(path) : kernels_of<Float16, false>(path);
}

Kernels kernels_of(const CombineLaunch& call) {
  const RowPath path = path_of(call.mover, call.payload.row_bytes);
  return kernels_of(path, call.scale != CombineScale::kNone, call.payload.dtype);
}

}  // namespace

void prepare_copied_combine() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool is_scaled : {false, true}) {
      for (const RowPath path : kRowPaths) {
        const Kernels kernels = kernels_of(path, is_scaled, dtype);
        prepare(kernels.pack);
        prepare(kernels.sum);
      }
    }
  }
}

void launch_combine_pack(const CombineLaunch& call, cudaStream_t stream) {
  launch(kernels_of(call).pack, call.num_reduce, call, stream);
}

void launch_combine_sum(const CombineLaunch& call, cudaStream_t stream) {
  launch(kernels_of(call).sum, call.num_sum, call, stream);
}

}  // namespace weft
