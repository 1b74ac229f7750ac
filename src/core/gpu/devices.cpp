// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/devices.hpp"

#include <cuda_runtime_api.h>

#include "core/check.hpp"

namespace weft {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string_view reach_between(int from, int to) {
  if (from == to) {
    return "itself";
  }
  int can_access = 0;
  int has_atomics = 0;
  if (cudaDeviceCanAccessPeer(&can_access, from, to) != cudaSuccess || can_access == 0) {
    static_cast<void>(cudaGetLastError());
    return kNoReach;
  }
  const auto attribute = cudaDevP2PAttrNativeAtomicSupported;
  if (cudaDeviceGetP2PAttribute(&has_atomics, attribute, from, to) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
  }
  return has_atomics != 0 ? "atomics too" : "loads and stores";
}

}  // namespace

GpuList list_gpus() {
  GpuList list;
  list.runtime = version_text(CUDART_VERSION);
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    list.none_reason = "no CUDA driver is loaded";
    return list;
  }
  list.driver = version_text(driver);
  int num_gpus = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_gpus);
  if (status != cudaSuccess) {
    list.none_reason = cudaGetErrorString(status);
    static_cast<void>(cudaGetLastError());  // leave no error behind for the next call
    return list;
  }
  for (int gpu_idx = 0; gpu_idx < num_gpus; ++gpu_idx) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, gpu_idx) == cudaSuccess) {
      list.gpus.push_back(
          {properties.name,
           properties.major,
           properties.minor,
           static_cast<int64_t>(properties.totalGlobalMem),
           properties.multiProcessorCount,
           properties.l2CacheSize}
      );
    }
  }
  if (list.gpus.empty()) {
    list.none_reason = "the driver lists no GPU";
  }
  return list;
}

std::vector<std::vector<std::string_view>> gpu_reach() {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  std::vector<std::vector<std::string_view>> reach;
  for (int from = 0; from < num_gpus; ++from) {
    auto& row = reach.emplace_back();
    for (int to = 0; to < num_gpus; ++to) {
      row.push_back(reach_between(from, to));
    }
  }
  return reach;
}

}  // namespace weft
