// SPDX-License-Identifier: Apache-2.0
// Memory of the GPU or pinned memory of the host, zeroed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/gpu/check.hpp"

namespace weft::test {

struct FreeDevice {
  void operator()(std::byte* data) const { static_cast<void>(cudaFree(data)); }
};
using DeviceBytes = std::unique_ptr<std::byte, FreeDevice>;

struct FreePinned {
  void operator()(std::byte* data) const { static_cast<void>(cudaFreeHost(data)); }
};
using PinnedBytes = std::unique_ptr<std::byte, FreePinned>;

[[nodiscard]] inline DeviceBytes device_bytes(size_t num_bytes) {
  void* data = nullptr;
  const size_t at_least = std::max<size_t>(num_bytes, 16);
  WEFT_CUDA(Context{}, cudaMalloc(&data, at_least));
  DeviceBytes bytes(static_cast<std::byte*>(data));
  WEFT_CUDA(Context{}, cudaMemset(data, 0, at_least));
  return bytes;
}

[[nodiscard]] inline DeviceBytes device_copy(const void* from, size_t num_bytes) {
  DeviceBytes bytes = device_bytes(num_bytes);
  if (num_bytes > 0) {
    WEFT_CUDA(Context{}, cudaMemcpy(bytes.get(), from, num_bytes, cudaMemcpyHostToDevice));
  }
  return bytes;
}

[[nodiscard]] inline PinnedBytes pinned_bytes(size_t num_bytes) {
  void* data = nullptr;
  WEFT_CUDA(Context{}, cudaMallocHost(&data, num_bytes));
  std::memset(data, 0, num_bytes);
  return PinnedBytes(static_cast<std::byte*>(data));
}

}  // namespace weft::test
