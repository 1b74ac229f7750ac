// SPDX-License-Identifier: Apache-2.0
// The default GPU transport, CUDA IPC: cudaMalloc on one side, cudaIpcOpenMemHandle on the other.
// It needs no more than a driver. cudaFree and cudaIpcCloseMemHandle wait for the work of the GPU
// themselves.
#include <cuda.h>

#include <cstring>

#include "core/check.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/driver.hpp"
#include "cuda/transport/gpu_transport.hpp"

namespace weft {
namespace {

// Data that a peer needs to map some memory. A handle names the whole allocation of the driver that
// holds it.
struct Export {
  cudaIpcMemHandle_t handle;
  uint64_t offset;
};
static_assert(sizeof(Export) <= sizeof(ExportedMemory));

class IpcTransport final : public GpuTransport {
 public:
  explicit IpcTransport(const GpuTransportOptions& options) : options_(options) {}

  GpuAllocation allocate(uint64_t bytes) override {
    const CudaDeviceGuard guard(options_.device, options_.context);
    void* data = nullptr;
    WEFT_CUDA(options_.context, cudaMalloc(&data, bytes));
    GpuAllocation made;
    made.data = {static_cast<std::byte*>(data), [device = options_.device](std::byte* address) {
                   on_device_quietly(device, "memory", [&] { return cudaFree(address); });
                 }};
    if (options_.is_exported) {
      Export exported = {};
      WEFT_CUDA(options_.context, cudaIpcGetMemHandle(&exported.handle, data));
      const auto address = reinterpret_cast<CUdeviceptr>(data);
      CUdeviceptr begin = 0;
      size_t whole = 0;
      WEFT_CUDA(options_.context, WEFT_DRIVER(cuMemGetAddressRange)(&begin, &whole, address));
      exported.offset = address - begin;
      std::memcpy(made.exported.data(), &exported, sizeof exported);
    }
    return made;
  }

  std::shared_ptr<std::byte> map(
      int owner, const ExportedMemory& memory, uint64_t /*bytes*/
  ) override {
    const CudaDeviceGuard guard(options_.device, options_.context);
    Export exported = {};
    std::memcpy(&exported, memory.data(), sizeof exported);
    void* begin = nullptr;
    const cudaError_t status =
        cudaIpcOpenMemHandle(&begin, exported.handle, cudaIpcMemLazyEnablePeerAccess);
    if (status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
    }
    WEFT_CHECK(
        options_.context,
        status == cudaSuccess,
        ErrorCode::kNotAvailable,
        "map: GPU memory of rank {} cannot be mapped by CUDA IPC: {} ({})",
        owner,
        cudaGetErrorString(status),
        cudaGetErrorName(status)
    );
    return {
        static_cast<std::byte*>(begin) + exported.offset,
        [device = options_.device, begin](std::byte* /*address*/) {
          on_device_quietly(device, "mapping", [&] { return cudaIpcCloseMemHandle(begin); });
        }};
  }

 private:
  GpuTransportOptions options_;
};

}  // namespace

std::unique_ptr<GpuTransport> make_ipc_transport(const GpuTransportOptions& options) {
  return std::make_unique<IpcTransport>(options);
}

}  // namespace weft
