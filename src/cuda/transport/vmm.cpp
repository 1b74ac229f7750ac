// SPDX-License-Identifier: Apache-2.0
// The GPU transports "vmm" and "fabric": physical memory of cuMemCreate, mapped at addresses of
// each process's own. File descriptors (fd_server.hpp) and fabric handles differ only in how the
// memory is named to another process.
#include <cuda.h>

#include <cstring>
#include <utility>

#include "core/check.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/driver.hpp"
#include "cuda/transport/fd_server.hpp"
#include "cuda/transport/gpu_transport.hpp"

namespace weft {
namespace {

static_assert(sizeof(FdTicket) <= sizeof(ExportedMemory));
static_assert(sizeof(CUmemFabricHandle) <= sizeof(ExportedMemory));

constexpr uint64_t kLeastBytes = uint64_t{2} << 20;  // the driver's granularity of cuMemCreate

// The driver's reference to some physical memory, which lives on where it is mapped.
struct Physical {
  Physical() = default;
  ~Physical() {
    if (handle != 0) {
      static_cast<void>(WEFT_DRIVER(cuMemRelease)(handle));
    }
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  CUmemGenericAllocationHandle handle = 0;
};

class VmmTransport final : public GpuTransport {
 public:
  VmmTransport(const GpuTransportOptions& options, VmmHandle handle)
      : options_(options),
        kind_(
            handle == VmmHandle::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                         : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        ) {
    const std::string_view name = is_fabric() ? "fabric" : "vmm";
    try {
      if (options.is_exported && !is_fabric()) {
        server_ = std::make_shared<FdServer>(options.context);
      }
      static_cast<void>(allocate(kLeastBytes));  // attributes of GPUs promise more than machines do
    } catch (const Error& error) {
      raise_error(
          ErrorCode::kNotAvailable,
          options.context,
          fmt::format("open({}): GPU {}: {}", name, options.device, error.what())
      );
    }
  }

  GpuAllocation allocate(uint64_t bytes) override {
    const CudaDeviceGuard guard(options_.device, options_.context);
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.requestedHandleTypes = options_.is_exported ? kind_ : CU_MEM_HANDLE_TYPE_NONE;
    wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = options_.device};
    wanted.allocFlags.gpuDirectRDMACapable = can_reach_network() ? 1 : 0;
    Physical memory;
    const Context& context = options_.context;
    WEFT_CUDA(context, WEFT_DRIVER(cuMemCreate)(&memory.handle, bytes, &wanted, uint64_t{0}));
    GpuAllocation made;
    made.data = map_here(memory, bytes, options_.devices);
    if (options_.is_exported) {
      export_to(made, memory);
    }
    return made;
  }

  std::shared_ptr<std::byte> map(int owner, const ExportedMemory& exported, uint64_t bytes)
      override {
    return import <std::shared_ptr<std::byte>>(owner, exported, [&](const Physical& memory) {
      return map_here(memory, bytes, {options_.device});
    });
  }

  bool map_instead(std::byte* mapping, int owner, const ExportedMemory& exported, uint64_t bytes)
      override {
    return import <bool>(owner, exported, [&](const Physical& memory) {
      const auto at = reinterpret_cast<CUdeviceptr>(mapping);
      WEFT_CUDA(options_.context, WEFT_DRIVER(cuMemUnmap)(at, bytes));
      map_at(at, memory, bytes, {options_.device});
      return true;
    });
  }

 private:
  // Returns what `use` makes of memory that another process exports.
  template <class Result, class Use>
  Result import(int owner, const ExportedMemory& exported, const Use& use) const {
    try {
      const CudaDeviceGuard guard(options_.device, options_.context);
      Physical memory;
      import_from(exported, memory);
      return use(memory);
    } catch (const Error& error) {
      raise_error(
          ErrorCode::kNotAvailable,
          options_.context,
          fmt::format("map: GPU memory of rank {} cannot be mapped: {}", owner, error.what())
      );
    }
  }

  // Maps memory at reserved addresses; if it throws, nothing is mapped there.
  void map_at(
      CUdeviceptr at, const Physical& memory, uint64_t bytes, const std::vector<int>& devices
  ) const {
    const Context& context = options_.context;
    WEFT_CUDA(context, WEFT_DRIVER(cuMemMap)(at, bytes, uint64_t{0}, memory.handle, uint64_t{0}));
    try {
      std::vector<CUmemAccessDesc> access;
      for (const int device : devices) {
        access.push_back(
            {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE}
        );
      }
      WEFT_CUDA(context, WEFT_DRIVER(cuMemSetAccess)(at, bytes, access.data(), access.size()));
    } catch (...) {
      static_cast<void>(WEFT_DRIVER(cuMemUnmap)(at, bytes));
      throw;
    }
  }

  // Maps the memory at addresses of this process, for kernels of `devices` to load and store.
  [[nodiscard]] std::shared_ptr<std::byte> map_here(
      const Physical& memory, uint64_t bytes, const std::vector<int>& devices
  ) const {
    const Context& context = options_.context;
    const uint64_t none = 0;
    CUdeviceptr at = 0;
    WEFT_CUDA(context, WEFT_DRIVER(cuMemAddressReserve)(&at, bytes, none, CUdeviceptr{0}, none));
    try {
      map_at(at, memory, bytes, devices);
    } catch (...) {
      static_cast<void>(WEFT_DRIVER(cuMemAddressFree)(at, bytes));
      throw;
    }
    return {reinterpret_cast<std::byte*>(at), [device = options_.device, bytes](std::byte* data) {
              on_device_quietly(device, "mapping", [&] {
                // Unlike cudaFree, to unmap waits for nothing.
                static_cast<void>(cudaDeviceSynchronize());
                return unmap(reinterpret_cast<CUdeviceptr>(data), bytes);
              });
            }};
  }

  static cudaError_t unmap(CUdeviceptr at, uint64_t bytes) {
    const cudaError_t status = WEFT_DRIVER(cuMemUnmap)(at, bytes);
    const cudaError_t freed = WEFT_DRIVER(cuMemAddressFree)(at, bytes);
    return status != cudaSuccess ? status : freed;
  }

  [[nodiscard]] bool is_fabric() const { return kind_ == CU_MEM_HANDLE_TYPE_FABRIC; }

  void export_to(GpuAllocation& made, const Physical& memory) const {
    int fd = -1;
    void* const to = is_fabric() ? static_cast<void*>(made.exported.data()) : &fd;
    WEFT_CUDA(
        options_.context,
        WEFT_DRIVER(cuMemExportToShareableHandle)(to, memory.handle, kind_, uint64_t{0})
    );
    if (is_fabric()) {
      return;
    }
    const FdTicket ticket = server_->offer(fd);
    std::memcpy(made.exported.data(), &ticket, sizeof ticket);
    // An open descriptor keeps the memory, so it is offered for as long as the memory is in use.
    made.data = {made.data.get(), [server = server_, ticket, data = made.data](auto*) mutable {
                   server->withdraw(ticket);
                   data.reset();
                 }};
  }

  void import_from(const ExportedMemory& exported, Physical& memory) const {
    CUmemFabricHandle handle = {};
    Descriptor fd;
    void* from = &handle;
    if (is_fabric()) {
      std::memcpy(&handle, exported.data(), sizeof handle);
    } else {
      FdTicket ticket;
      std::memcpy(&ticket, exported.data(), sizeof ticket);
      fd = fetch_fd(ticket, options_.context);
      from = reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get()));
    }
    WEFT_CUDA(
        options_.context, WEFT_DRIVER(cuMemImportFromShareableHandle)(&memory.handle, from, kind_)
    );
  }

  // Returns whether network cards can access memory that is allocated for them.
  [[nodiscard]] bool can_reach_network() const {
    int can = 0;
    const auto attribute = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    WEFT_CUDA(
        options_.context, WEFT_DRIVER(cuDeviceGetAttribute)(&can, attribute, options_.device)
    );
    return can != 0;
  }

  GpuTransportOptions options_;
  CUmemAllocationHandleType kind_;
  std::shared_ptr<FdServer> server_;  // null: no process maps by descriptor
};

}  // namespace

std::unique_ptr<GpuTransport> make_vmm_transport(
    const GpuTransportOptions& options, VmmHandle handle
) {
  return std::make_unique<VmmTransport>(options, handle);
}

}  // namespace weft
