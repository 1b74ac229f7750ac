// SPDX-License-Identifier: Apache-2.0
// How GPUs of one host, or of one NVLink fabric, reach each other's memory: one interface for every
// way to share device memory between processes. ipc.cpp and vmm.cpp implement it, registry.cpp
// finds an implementation by its name, peer_memory.cpp uses it. docs/adding_a_transport.md says how
// to write one.
//
// Threads of one process need no transport: they use each other's memory as it is. peer_regions.hpp
// knows which regions exist, who has mapped them and when one may be freed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/context.hpp"

namespace weft {

// Data that another process needs to map some memory; only the transport that made the data
// understands it. Travels to the peers over the board, so it holds plain bytes: as many as CUDA IPC
// needs, a handle of 64 and an offset of 8.
using ExportedMemory = std::array<std::byte, 72>;

struct GpuAllocation {
  std::shared_ptr<std::byte> data;  // its last copy frees the memory
  ExportedMemory exported = {};
};

// Any thread may call a transport. Memory from it may outlive it, and goes back from any thread,
// after the work that is queued on the GPU by then.
class GpuTransport {
 public:
  virtual ~GpuTransport() = default;
  // Allocates memory on this rank's GPU, contents undefined. `bytes` is a multiple of 2 MiB. Throws
  // Error (kOutOfMemory, kCuda).
  [[nodiscard]] virtual GpuAllocation allocate(uint64_t bytes) = 0;
  // Maps, for this rank's GPU, `bytes` that rank `owner`, another process, allocated. The last copy
  // unmaps them. Must not wait for running kernels. Throws Error (kNotAvailable).
  [[nodiscard]] virtual std::shared_ptr<std::byte> map(
      int owner, const ExportedMemory& exported, uint64_t bytes
  ) = 0;
  // Maps other memory of that size at the addresses of `mapping`, which map() has made and no
  // kernel uses, so that captured graphs find it. Returns false, changing nothing, if the transport
  // cannot. Throws Error (kNotAvailable); then nothing is mapped there.
  [[nodiscard]] virtual bool map_instead(
      std::byte* /*mapping*/, int /*owner*/, const ExportedMemory& /*exported*/, uint64_t /*bytes*/
  ) {
    return false;
  }
};

struct GpuTransportOptions {
  int device = 0;            // this rank's GPU
  std::vector<int> devices;  // of this process, whose kernels use what this rank allocates
  bool is_exported = false;  // other processes map what this rank allocates
  Context context;           // for messages
};

// CUDA IPC: plain allocations, each named to other processes by a handle.
[[nodiscard]] std::unique_ptr<GpuTransport> make_ipc_transport(const GpuTransportOptions& options);
// Virtual memory management (VMM): physical memory that every process maps at addresses of its own,
// named by a file descriptor, or by a handle that GPUs of one NVLink fabric understand (MNNVL).
enum class VmmHandle : uint8_t { kDescriptor, kFabric };
[[nodiscard]] std::unique_ptr<GpuTransport> make_vmm_transport(
    const GpuTransportOptions& options, VmmHandle handle
);

// Returns every name that Weft knows, the default first.
[[nodiscard]] std::vector<std::string> gpu_transport_names();
// Makes a transport. Throws Error: kInvalidArgument for an unknown name, kNotAvailable with the
// reason if this machine does not allow it.
[[nodiscard]] std::unique_ptr<GpuTransport> make_gpu_transport(
    std::string_view name, const GpuTransportOptions& options
);
// Returns why this process cannot share memory of GPU `device` by `name`; empty: it can.
[[nodiscard]] std::string gpu_transport_obstacle(std::string_view name, int device);

}  // namespace weft
