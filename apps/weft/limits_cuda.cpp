// SPDX-License-Identifier: Apache-2.0
#include "limits_cuda.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "core/check_cuda.hpp"
#include "core/devices.hpp"
#include "gpu_timer_cuda.hpp"
#include "link_rig_cuda.hpp"
#include "measure.hpp"

namespace weft::program {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

LinkRate measure_local_copy() {
  constexpr int64_t kBytes = 512 * kMiB;
  const DeviceBytes from = allocate(0, kBytes, 1);
  const DeviceBytes to = allocate(0, kBytes, 0);
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  cudaStream_t stream = nullptr;
  WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GpuTimer timer(std::array{0}, std::array{stream});
  const auto us = timer.measure(kLinkWarmup, kLinkSamples, [&](int) {
    WEFT_CUDA(
        Context{},
        cudaMemcpyAsync(
            to.get(), from.get(), static_cast<size_t>(kBytes), cudaMemcpyDeviceToDevice, stream
        )
    );
  });
  WEFT_CUDA(Context{}, cudaStreamDestroy(stream));
  return {LinkWay::kLocalCopy, 0, 2.0 * kBytes, percentile(us, 50), percentile(us, 99)};
}

std::vector<int> sm_counts(int num_sms, bool is_quick) {
  std::vector<int> counts = {4, 8, 12, 16, 24, 32, 48, 64, 96};
  if (is_quick) {
    counts = {8, 24};
  }
  std::erase_if(counts, [&](int count) { return count >= num_sms; });
  counts.push_back(num_sms);
  return counts;
}

std::vector<LinkWay> ways_of(int major) {
  std::vector<LinkWay> ways = {LinkWay::kStores, LinkWay::kLoads};
  if (major >= 9) {
    ways.insert(
        ways.end(),
        {LinkWay::kBulkStoresSmall,
         LinkWay::kBulkStoresLarge,
         LinkWay::kBulkLoadsSmall,
         LinkWay::kBulkLoadsLarge}
    );
  }
  return ways;
}

int attribute(cudaDeviceAttr name) {
  int value = 0;
  WEFT_CUDA(Context{}, cudaDeviceGetAttribute(&value, name, 0));
  return value;
}

int num_visible_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return std::min(count, kMaxLinkPeers);
}

bool all_reach_all() {
  for (const auto& row : gpu_reach()) {
    if (std::ranges::find(row, GpuReach::kNone) != row.end()) {
      return false;
    }
  }
  return true;
}

// The caller's current GPU stays current.
class KeepDevice {
 public:
  KeepDevice() { static_cast<void>(cudaGetDevice(&device_)); }
  ~KeepDevice() { static_cast<void>(cudaSetDevice(device_)); }
  KeepDevice(const KeepDevice&) = delete;
  KeepDevice& operator=(const KeepDevice&) = delete;

 private:
  int device_ = 0;
};

}  // namespace

std::string link_way_name(LinkWay way) {
  switch (way) {
    case LinkWay::kCopyEngine:
      return "copy engine";
    case LinkWay::kStores:
      return "stores 16 B";
    case LinkWay::kLoads:
      return "loads 16 B";
    case LinkWay::kBulkStoresSmall:
      return "bulk stores 4 KB";
    case LinkWay::kBulkStoresLarge:
      return "bulk stores 14 KB";
    case LinkWay::kBulkLoadsSmall:
      return "bulk loads 4 KB";
    case LinkWay::kBulkLoadsLarge:
      return "bulk loads 14 KB";
    case LinkWay::kLocalCopy:
      return "copy inside a GPU";
  }
  return "unknown";
}

GpuLinkLimits measure_gpu_limits(int num_gpus, bool is_quick) {
  const KeepDevice keep;
  GpuLinkLimits limits;
  limits.num_gpus = num_gpus;
  limits.rates.push_back(measure_local_copy());
  limits.local_copy_gbps = limits.rates.back().gbps();
  if (num_gpus < 2) {
    return limits;
  }
  LinkRig rig(num_gpus, (is_quick ? 32 : 256) * kMiB);
  limits.rates.push_back(rig.measure(LinkWay::kCopyEngine, 0));
  limits.copy_engine_gbps = limits.rates.back().gbps();
  for (const LinkWay way : ways_of(attribute(cudaDevAttrComputeCapabilityMajor))) {
    for (const int sms : sm_counts(attribute(cudaDevAttrMultiProcessorCount), is_quick)) {
      limits.rates.push_back(rig.measure(way, sms));
    }
  }
  limits.signal_us = rig.measure_signal();
  return limits;
}

double all_to_all_limit_gbps() {
  static const double gbps = [] {
    const KeepDevice keep;
    const int num_gpus = num_visible_gpus();
    if (num_gpus < 2 || !all_reach_all()) {
      return 0.0;
    }
    return LinkRig(num_gpus, 128 * kMiB).measure(LinkWay::kCopyEngine, 0).gbps();
  }();
  return gbps;
}

double local_copy_limit_gbps() {
  static const double gbps = [] {
    const KeepDevice keep;
    return num_visible_gpus() < 1 ? 0 : measure_local_copy().gbps();
  }();
  return gbps;
}

}  // namespace weft::program
