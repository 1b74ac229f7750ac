// SPDX-License-Identifier: Apache-2.0
// Adds the microseconds that this rank has waited for its peers to sums of the caller's. Before:
// device/wait.cuh, which counts; after: the caller.
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

__global__ void add_waits(const __grid_constant__ WaitSums call) {
  constexpr uint64_t kNanoseconds = 1000;  // of a microsecond
  const auto place = static_cast<int>(threadIdx.x);
  if (place >= call.count) {
    return;
  }
  int64_t waited = call.host_us[place];
  if (call.local != nullptr) {
    waited += static_cast<int64_t>(call.local->wait_ns[place] / kNanoseconds);
  }
  call.sums[call.ranks[place]] += call.times * waited;
}

}  // namespace

void prepare_waits() {
  load(add_waits);
}

void launch_add_waits(const WaitSums& call, cudaStream_t stream) {
  launch(Kernel<WaitSums>{add_waits, kMaxDomainRanks}, 1, call, stream);
}

}  // namespace weft
