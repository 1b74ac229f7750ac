// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include "core/devices.hpp"

namespace weft {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
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
           static_cast<int64_t>(properties.totalGlobalMem)}
      );
    }
  }
  if (list.gpus.empty()) {
    list.none_reason = "the driver lists no GPU";
  }
  return list;
}

}  // namespace weft
