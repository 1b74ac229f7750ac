// SPDX-License-Identifier: Apache-2.0
// combine on a GPU: one launch, blocks of two roles (combine_reduce.cuh, combine_sum.cuh). Previous
// in the data flow: exchange/combine_call_cuda.cpp.
#include "core/check_cuda.hpp"
#include "kernels/combine_reduce.cuh"
#include "kernels/combine_sum.cuh"
#include "kernels/launch.hpp"
#include "kernels/row_adder.cuh"
#include "kernels/row_loader.cuh"

namespace weft {
namespace {

constexpr int kBulkSharedBytes = kRowStageBytes;

__device__ DeviceWord word_of_call(const CombineLaunch& call) {
  DeviceWord word;
  word.op = DeviceOp::kCombine;
  word.rows = call.staging;
  for (int i = 0; i < kDeviceSignatureFields; ++i) {
    word.signature[i] = call.signature[i];
  }
  return word;
}

template <class Element, bool kScaled>
__global__ void __launch_bounds__(kRoleThreads, 1)
    combine_vector(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  if (begin_call(setup, call.me, call.plan, word_of_call(call))) {
    const int block = static_cast<int>(blockIdx.x);
    const bool is_signaller = warp_in_block() == kMoverWarps;
    const int warps = team_warps(call.row_bytes, call.plan.header()->num_tokens);
    if (block < call.num_reduce) {
      const Team team = make_team(warps, block, call.num_reduce);
      CombineReduce<kScaled> source(call, setup, progress, team);
      if (is_signaller) {
        source.run_signals(kMoverWarps / warps);
      } else if (source.is_open()) {
        sum_rows_vector<Element, kScaled>(source, slice_of(team, call.row_bytes, kSumPiece));
      }
    } else if (!is_signaller) {
      const Team team = make_team(warps, block - call.num_reduce, call.num_sum);
      CombineSum source(call, setup, team);
      source.begin();
      sum_rows_vector<Element, false>(source, slice_of(team, call.row_bytes, kSumPiece));
    }
  }
  finish_call(call.me, setup.epoch);
}

template <class Element, bool kScaled>
__global__ void __launch_bounds__(kPipelineThreads, 1)
    combine_bulk(const __grid_constant__ CombineLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stage_bytes[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ PipelineShared pipelines;
  clear_progress(progress);
  init_pipelines(pipelines);
  if (begin_call(setup, call.me, call.plan, word_of_call(call))) {
    const int block = static_cast<int>(blockIdx.x);
    const bool is_reduce = block < call.num_reduce;
    const int place = is_reduce ? block : block - call.num_reduce;
    const PipelineRole role = pipeline_role();
    const RowStages stages = row_stages(stage_bytes, call.row_bytes, role.pipeline);
    const Team team = pipeline_team(role, place, is_reduce ? call.num_reduce : call.num_sum);
    if (is_reduce) {
      CombineReduce<kScaled> source(call, setup, progress, team);
      if (role.is_loader) {
        load_rows(source, role.pipeline, stages, pipelines);
      } else if (role.adder >= 0) {
        add_rows<Element, kScaled>(source, role, stages, pipelines);
      } else {
        source.run_signals(kPipelines);
      }
    } else {
      CombineSum source(call, setup, team);
      if (role.is_loader) {
        load_rows(source, role.pipeline, stages, pipelines);
      } else if (role.adder >= 0) {
        source.begin();
        add_rows<Element, false>(source, role, stages, pipelines);
      }
    }
  }
  finish_call(call.me, setup.epoch);
#endif
}

using Kernel = void (*)(CombineLaunch);

template <class Element>
Kernel kernel_of(bool is_scaled, bool is_bulk) {
  if (is_bulk) {
    return is_scaled ? combine_bulk<Element, true> : combine_bulk<Element, false>;
  }
  return is_scaled ? combine_vector<Element, true> : combine_vector<Element, false>;
}

Kernel kernel_of(DType dtype, bool is_scaled, bool is_bulk) {
  switch (dtype) {
    case DType::kBFloat16:
      return kernel_of<BFloat16>(is_scaled, is_bulk);
    case DType::kFloat16:
      return kernel_of<Float16>(is_scaled, is_bulk);
    default:
      return kernel_of<Float32>(is_scaled, is_bulk);
  }
}

}  // namespace

void prepare_combine() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool is_scaled : {false, true}) {
      for (const bool is_bulk : {false, true}) {
        const auto* kernel = reinterpret_cast<const void*>(kernel_of(dtype, is_scaled, is_bulk));
        cudaFuncAttributes attributes{};
        WEFT_CUDA(Context{}, cudaFuncGetAttributes(&attributes, kernel));
        if (is_bulk && attributes.binaryVersion >= 90) {
          WEFT_CUDA(
              Context{},
              cudaFuncSetAttribute(
                  kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkSharedBytes
              )
          );
        }
      }
    }
  }
}

void launch_combine(const CombineLaunch& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(call.num_reduce + call.num_sum);
  const bool is_bulk = call.mover == Mover::kBulk;
  const Kernel kernel = kernel_of(call.dtype, call.scale != CombineScale::kNone, is_bulk);
  if (is_bulk) {
    kernel<<<blocks, kPipelineThreads, kBulkSharedBytes, stream>>>(call);
  } else {
    kernel<<<blocks, kRoleThreads, 0, stream>>>(call);
  }
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
