// SPDX-License-Identifier: Apache-2.0
#include "transport/peer/cuda_handle.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core/check.hpp"
#include "core/check_cuda.hpp"
#include "core/driver_cuda.hpp"
#include "core/log.hpp"
#include "core/scope_cuda.hpp"

namespace weft {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(RegionHandle::exported));

// Regions of this process by id, so that they live until their last user in it is gone.
class Registry {
 public:
  uint64_t add(std::weak_ptr<std::byte> region) {
    const std::lock_guard lock(mutex_);
    regions_[++last_id_] = std::move(region);
    return last_id_;
  }
  void remove(uint64_t id) {
    const std::lock_guard lock(mutex_);
    regions_.erase(id);
  }
  [[nodiscard]] std::shared_ptr<std::byte> find(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    return found == regions_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<std::byte>> regions_;
  uint64_t last_id_ = 0;
};

Registry& registry() {
  static auto& instance = *new Registry;  // never destroyed: regions may outlive static objects
  return instance;
}

// For deleters: CUDA may already be shut down, and nobody could act on an error.
template <class Step>
void on_device_quietly(int device, Step step) {
  const RelaxedCapture no_capture;
  int before = -1;
  static_cast<void>(cudaGetDevice(&before));
  if (cudaSetDevice(device) == cudaSuccess) {
    const cudaError_t status = step();
    if (status != cudaSuccess && status != cudaErrorCudartUnloading) {
      log(LogLevel::kDebug, "peer memory: not given back: {}", cudaGetErrorString(status));
    }
  }
  if (before >= 0 && before != device) {
    static_cast<void>(cudaSetDevice(before));
  }
  static_cast<void>(cudaGetLastError());
}

int current_device(const Context& context) {
  int device = -1;
  WEFT_CUDA(context, cudaGetDevice(&device));
  return device;
}

}  // namespace

OwnRegion make_cuda_region(uint64_t bytes, bool is_exported, const Context& context) {
  const int device = current_device(context);
  void* data = nullptr;
  WEFT_CUDA(context, cudaMalloc(&data, bytes));
  auto id = std::make_shared<uint64_t>(0);
  OwnRegion region;
  region.data =
      std::shared_ptr<std::byte>(static_cast<std::byte*>(data), [device, id](std::byte* address) {
        registry().remove(*id);
        on_device_quietly(device, [&] { return cudaFree(address); });
      });
  *id = registry().add(region.data);
  region.handle.id = *id;
  region.handle.bytes = bytes;
  if (is_exported) {
    cudaIpcMemHandle_t handle{};
    WEFT_CUDA(context, cudaIpcGetMemHandle(&handle, data));
    std::memcpy(region.handle.exported.data(), &handle, sizeof handle);
    // An IPC handle names the whole allocation.
    const auto begin = allocation_begin(region.data.get(), context);
    WEFT_CHECK(
        context,
        begin.has_value(),
        ErrorCode::kCuda,
        "allocate: the driver does not say where the allocation of {} begins",
        data
    );
    region.handle.offset = static_cast<uint64_t>(region.data.get() - *begin);
  }
  return region;
}

std::shared_ptr<std::byte> find_cuda_region(const RegionHandle& handle) {
  return registry().find(handle.id);
}

std::shared_ptr<std::byte> open_cuda_region(
    const RegionHandle& handle, int owner, const Context& context
) {
  const int device = current_device(context);
  cudaIpcMemHandle_t ipc{};
  std::memcpy(&ipc, handle.exported.data(), sizeof ipc);
  void* begin = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&begin, ipc, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
  }
  WEFT_CHECK(
      context,
      status == cudaSuccess,
      ErrorCode::kNotAvailable,
      "map: GPU memory of rank {} cannot be mapped by CUDA IPC: {} ({})",
      owner,
      cudaGetErrorString(status),
      cudaGetErrorName(status)
  );
  auto* const first = static_cast<std::byte*>(begin);
  return {first + handle.offset, [device, first](std::byte* /*address*/) {
            on_device_quietly(device, [&] { return cudaIpcCloseMemHandle(first); });
          }};
}

}  // namespace weft
