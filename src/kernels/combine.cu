// SPDX-License-Identifier: Apache-2.0
// combine on a GPU: one launch, blocks of two roles (combine_reduce.cuh, combine_sum.cuh). Previous
// in the data flow: exchange/combine_call_cuda.cpp.
#include "core/check_cuda.hpp"
#include "kernels/combine_reduce.cuh"
#include "kernels/combine_sum.cuh"
#include "kernels/launch.hpp"

namespace weft {
namespace {

constexpr int kThreads = 384;

template <class Element, bool kScaled>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  DeviceWord word;
  word.op = DeviceOp::kCombine;
  word.rows = call.staging;
  for (int i = 0; i < kDeviceSignatureFields; ++i) {
    word.signature[i] = call.signature[i];
  }
  if (begin_call(setup, call.me, call.plan, word)) {
    if (static_cast<int>(blockIdx.x) < call.num_reduce) {
      CombineReduce<Element, kScaled>(call, setup).run();
    } else {
      CombineSum<Element>(call, setup).run();
    }
  }
  finish_call(call.me, setup.epoch);
}

using Kernel = void (*)(CombineLaunch);

template <class Element>
Kernel kernel_of(bool is_scaled) {
  return is_scaled ? combine_kernel<Element, true> : combine_kernel<Element, false>;
}

Kernel kernel_of(DType dtype, bool is_scaled) {
  switch (dtype) {
    case DType::kBFloat16:
      return kernel_of<BFloat16>(is_scaled);
    case DType::kFloat16:
      return kernel_of<Float16>(is_scaled);
    default:
      return kernel_of<Float32>(is_scaled);
  }
}

}  // namespace

void prepare_combine() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const bool is_scaled : {false, true}) {
      cudaFuncAttributes attributes{};
      WEFT_CUDA(
          Context{},
          cudaFuncGetAttributes(
              &attributes, reinterpret_cast<const void*>(kernel_of(dtype, is_scaled))
          )
      );
    }
  }
}

void launch_combine(const CombineLaunch& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(call.num_reduce + call.num_sum);
  kernel_of(call.dtype, call.scale != CombineScale::kNone)<<<blocks, kThreads, 0, stream>>>(call);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
