// SPDX-License-Identifier: Apache-2.0
// dispatch on a GPU: one launch, blocks of two roles (dispatch_push.cuh, dispatch_fan_out.cuh).
// Previous in the data flow: exchange/dispatch_call_cuda.cpp; next: the caller's experts.
#include "core/check_cuda.hpp"
#include "kernels/dispatch_fan_out.cuh"
#include "kernels/dispatch_push.cuh"
#include "kernels/launch.hpp"

namespace weft {
namespace {

__device__ DeviceWord word_of_call(const DispatchLaunch& call) {
  DeviceWord word;
  word.op = DeviceOp::kDispatch;
  word.place = call.place;
  word.rows = call.rows_target;
  word.scales = call.scales_target;
  for (int i = 0; i < kDeviceSignatureFields; ++i) {
    word.signature[i] = call.signature[i];
  }
  return word;
}

__global__ void __launch_bounds__(kRoleThreads, 1)
    dispatch_vector(const __grid_constant__ DispatchLaunch call) {
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  clear_progress(progress);
  if (begin_call(setup, call.me, call.plan, word_of_call(call))) {
    const int block = static_cast<int>(blockIdx.x);
    const int warp = warp_in_block();
    const bool is_signaller = warp == kMoverWarps;
    if (block < call.num_push) {
      DispatchPush push(call, setup, progress);
      is_signaller ? push.run_signals() : push.run_vector();
    } else if (!is_signaller) {
      const int first = block - call.num_push + warp * call.num_fan_out;
      DispatchFanOut(call, setup, first, kMoverWarps * call.num_fan_out).run();
    }
  }
  finish_call(call.me, setup.epoch);
}

// Every block has both roles: the bulk copy engine pushes, while other warps fan out by ordinary
// loads and stores, which do not compete with it inside a multiprocessor.
constexpr int kFanOutWarps = 7;
constexpr int kBulkThreads = (kMoverWarps + 1 + kFanOutWarps) * kWarpLanes;
constexpr int kBulkSharedBytes = kMoverWarps * kBulkStages * kBulkPiece;

__global__ void __launch_bounds__(kBulkThreads, 1)
    dispatch_bulk(const __grid_constant__ DispatchLaunch call) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte stages[];
  __shared__ CallSetup setup;
  __shared__ TeamProgress progress;
  __shared__ uint64_t full[kMoverWarps * kBulkStages];
  clear_progress(progress);
  const int block = static_cast<int>(blockIdx.x);
  const int warp = warp_in_block();
  if (begin_call(setup, call.me, call.plan, word_of_call(call))) {
    if (warp < kMoverWarps) {
      BulkRing ring(stages + warp * kBulkStages * kBulkPiece, full + warp * kBulkStages);
      DispatchPush(call, setup, progress).run_bulk(ring);
    } else if (warp == kMoverWarps) {
      DispatchPush(call, setup, progress).run_signals();
    } else {
      const int first = block + (warp - kMoverWarps - 1) * call.num_fan_out;
      DispatchFanOut(call, setup, first, kFanOutWarps * call.num_fan_out).run();
    }
  }
  finish_call(call.me, setup.epoch);
#endif
}

}  // namespace

void prepare_dispatch() {
  const Context nobody;
  cudaFuncAttributes attributes{};
  WEFT_CUDA(nobody, cudaFuncGetAttributes(&attributes, dispatch_vector));
  WEFT_CUDA(nobody, cudaFuncGetAttributes(&attributes, dispatch_bulk));
  if (attributes.binaryVersion >= 90) {
    WEFT_CUDA(
        nobody,
        cudaFuncSetAttribute(
            dispatch_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkSharedBytes
        )
    );
  }
}

void launch_dispatch(const DispatchLaunch& call, cudaStream_t stream) {
  if (call.mover == Mover::kBulk) {
    const auto blocks = static_cast<unsigned>(call.num_push);
    dispatch_bulk<<<blocks, kBulkThreads, kBulkSharedBytes, stream>>>(call);
  } else {
    const auto blocks = static_cast<unsigned>(call.num_push + call.num_fan_out);
    dispatch_vector<<<blocks, kRoleThreads, 0, stream>>>(call);
  }
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
