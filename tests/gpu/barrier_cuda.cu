// SPDX-License-Identifier: Apache-2.0
// Kernels that wait: a warp in shared memory for rows that nobody loads, and streams for their
// host.
#include "cuda/device/row_mover.cuh"
#include "gpu/barrier_cuda.hpp"

namespace weft::test {
namespace {

__global__ void wait_alone(const __grid_constant__ RankView me, int* has_come) {
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::init_barrier(&barrier);
    ptx::publish_barriers();
  }
  __syncthreads();
  const bool is_here = wait_barrier(me, Op::kCombine, &barrier, 0);
  *has_come = __any_sync(kAllLanes, is_here);
#endif
}

__global__ void wait_for_host(volatile int* const numbers) {
  const uint32_t begin = ptx::clock_now();
  while (numbers[0] == 0) {
    if (ptx::clock_now() - begin > 2'000'000'000) {
      numbers[1] = 1;
      return;
    }
  }
}

__global__ void do_nothing() {}

}  // namespace

void launch_wait_for_host(int* numbers, cudaStream_t stream) {
  wait_for_host<<<1, 1, 0, stream>>>(numbers);
  do_nothing<<<1, 1, 0, stream>>>();
  WEFT_CUDA(Context{}, cudaGetLastError());
}

void launch_wait_alone(const RankView& me, int* has_come) {
  wait_alone<<<1, kWarpLanes>>>(me, has_come);
  WEFT_CUDA(Context{}, cudaGetLastError());
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
}

}  // namespace weft::test
