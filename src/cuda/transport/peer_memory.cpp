// SPDX-License-Identifier: Apache-2.0
// Finds out whether the ranks' GPUs reach each other, chooses the GPU transport, enables access
// between the GPUs of this process, and keeps the table of regions on the GPU.
#include "cuda/transport/peer_memory.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <random>
#include <thread>
#include <unistd.h>

#include "core/check.hpp"
#include "core/env.hpp"
#include "core/gpu/check.hpp"
#include "core/local_memory.hpp"
#include "core/log.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

// How long a rank that ends waits for other processes to unmap its memory. The time is a guess: a
// rank with a longer deadline may stay in a call that this one gave up. CUDA does not say what
// becomes of memory freed while mapped, so after this time it stays until the process ends.
constexpr auto kFarewell = std::chrono::seconds(1);

uint64_t random_process_id() {
  static const uint64_t id = [] {
    std::random_device device;
    return uint64_t{device()} << 32U | device();
  }();
  return id;
}

// Identifies GPU `device` of this process; does not throw if there is none.
GpuIdentity identify_gpu(int device) {
  GpuIdentity gpu;
  gpu.pid = static_cast<uint64_t>(::getpid());
  gpu.process_id = random_process_id();
  int num_gpus = 0;
  cudaDeviceProp properties{};
  cudaError_t status = cudaGetDeviceCount(&num_gpus);
  const bool is_there = device >= 0 && device < num_gpus;
  if (status == cudaSuccess && is_there) {
    status = cudaGetDeviceProperties(&properties, device);
  }
  std::string problem;
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // leave no error behind for the next call
    problem = fmt::format("GPU {} cannot be asked: {}", device, cudaGetErrorString(status));
  } else if (!is_there) {
    problem = fmt::format("there is no GPU {} ({} are visible)", device, num_gpus);
  } else if (properties.unifiedAddressing == 0) {
    problem = fmt::format("GPU {} has no unified addresses", device);
  } else {
    std::memcpy(gpu.uuid.data(), properties.uuid.bytes, gpu.uuid.size());
    gpu.device = device;
  }
  problem.copy(gpu.problem.data(), gpu.problem.size() - 1);
  return gpu;
}

// Returns this process's number of the GPU; -1: not visible here.
int find_device(const GpuIdentity& gpu) {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return -1;
  }
  for (int device = 0; device < num_gpus; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) == cudaSuccess &&
        std::memcmp(properties.uuid.bytes, gpu.uuid.data(), gpu.uuid.size()) == 0) {
      return device;
    }
  }
  return -1;
}

// Returns why this rank's GPU cannot reach another rank's, as far as can be known without trying;
// empty: nothing speaks against it.
std::string obstacle_to(const GpuIdentity& own, const GpuIdentity& other, size_t other_rank) {
  if (other.device < 0) {
    return fmt::format("rank {}: {}", other_rank, other.problem.data());
  }
  if (own.device < 0 || own.is_same_gpu(other)) {
    return {};
  }
  const int theirs = find_device(other);
  if (theirs < 0) {
    return {};  // hidden from this process, which does not keep it from mapping memory there
  }
  int can_access = 0;
  const cudaError_t status = cudaDeviceCanAccessPeer(&can_access, own.device, theirs);
  if (status != cudaSuccess || can_access == 0) {
    static_cast<void>(cudaGetLastError());
    return fmt::format(
        "GPU {} cannot reach GPU {} of rank {}", own.device, other.device, other_rank
    );
  }
  return {};
}

// Returns the first obstacle_to() any rank that was ever connected; empty: none.
std::string reach_obstacle(const std::vector<GpuIdentity>& gpus, int own) {
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].pid == 0) {
      continue;
    }
    if (std::string found = obstacle_to(gpus[static_cast<size_t>(own)], gpus[rank], rank);
        !found.empty()) {
      return found;
    }
  }
  return {};
}

}  // namespace

std::vector<GpuIdentity> gather_identities(const Group& group, int device) {
  return gather_values(group, identify_gpu(device));
}

CudaRegions::CudaRegions(
    const Group& group, int device, std::string_view transport, const Meeting& who
)
    : rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      device_(device),
      name_(transport),
      gpus_(static_cast<size_t>(num_ranks_)) {
  meet(group, who);
}

void CudaRegions::meet(const Group& group, const Meeting& who) {
  const std::vector<GpuIdentity> identities = gather_identities(group, device_);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    GpuIdentity& known = gpus_[static_cast<size_t>(rank)];
    if (who.is_new(rank)) {
      const uint32_t bit = uint32_t{1} << static_cast<uint32_t>(rank);
      const bool was_apart = known.pid != 0 && !is_here(rank);
      were_apart_ = was_apart ? were_apart_ | bit : were_apart_ & ~bit;
    }
    if (who.has(rank)) {
      known = identities[static_cast<size_t>(rank)];
    }
  }
  agree(group, [&] {
    const std::string problem = reach_obstacle(gpus_, rank_);
    WEFT_CHECK(context(), problem.empty(), ErrorCode::kNotAvailable, "open: {}", problem);
    const std::string usual = Env::read().gpu_transport.value_or(gpu_transport_names().front());
    name_ = name_.empty() ? usual : name_;
  });
  agree_on_name(name_, group);
  agree(group, [&] {
    WEFT_CUDA(context(), cudaSetDevice(device_));
    const std::vector<int> devices = enable_access();
    if (transport_ != nullptr) {
      return;
    }
    transport_ = make_gpu_transport(
        name_,
        {.device = device_, .devices = devices, .is_exported = is_exported(), .context = context()}
    );
    const uint64_t entries = static_cast<uint64_t>(num_ranks_) * kMaxPeerRegions;
    table_.create(entries, nullptr, context());
    new_table_.create(entries, context());
    WEFT_CUDA(context(), cudaStreamSynchronize(nullptr));  // it is zero before the first entry
  });
}

// Enables access to this process's GPUs and returns each once, this rank's included. Other
// processes' GPUs follow when their memory is mapped.
std::vector<int> CudaRegions::enable_access() const {
  std::vector<int> devices = {device_};
  for (const GpuIdentity& other : gpus_) {
    if (!own().is_same_process(other) || std::ranges::count(devices, other.device) > 0) {
      continue;
    }
    devices.push_back(other.device);
    const cudaError_t status = cudaDeviceEnablePeerAccess(other.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(cudaGetLastError());
    } else if (status != cudaSuccess) {
      raise_cuda_error(status, "cudaDeviceEnablePeerAccess", context());
    }
  }
  return devices;
}

// Another thread may be capturing a stream, which by default keeps all threads from allocating and
// mapping; what the service thread does is never part of a capture.
void CudaRegions::enter_thread() {
  WEFT_CUDA(context(), cudaSetDevice(device_));
  auto mode = cudaStreamCaptureModeRelaxed;
  WEFT_CUDA(context(), cudaThreadExchangeStreamCaptureMode(&mode));
}

OwnRegion CudaRegions::allocate(uint64_t bytes) {
  const CudaDeviceGuard guard(device_, context());
  auto [data, exported] = transport_->allocate(bytes);
  OwnRegion region = {data, {.id = local_memory().add(data), .bytes = bytes, .exported = exported}};
  const cudaStream_t stream = short_work_stream(device_);
  WEFT_CUDA(context(), cudaMemsetAsync(region.data.get(), 0, bytes, stream));
  WEFT_CUDA(context(), cudaStreamSynchronize(stream));
  return region;
}

std::shared_ptr<std::byte> CudaRegions::map(int rank, const RegionHandle& handle) {
  if (is_here(rank)) {
    auto data = std::static_pointer_cast<std::byte>(local_memory().find(handle.id));
    const auto code = ErrorCode::kNotAvailable;
    WEFT_CHECK(context(), data != nullptr, code, "map: a region of rank {} is already gone", rank);
    return data;
  }
  return transport_->map(rank, handle.exported, handle.bytes);
}

std::shared_ptr<std::byte> CudaRegions::map_instead(
    std::shared_ptr<std::byte> mapping, int rank, const RegionHandle& handle
) {
  const bool was_apart = (were_apart_ >> static_cast<uint32_t>(rank) & 1U) != 0;
  const bool can_stay = was_apart && !is_here(rank) &&
                        transport_->map_instead(mapping.get(), rank, handle.exported, handle.bytes);
  if (can_stay) {
    return mapping;
  }
  mapping.reset();
  return map(rank, handle);
}

void CudaRegions::show_entry(int rank, uint32_t region, std::byte* data) {
  std::byte*& entry = new_table_.get()[static_cast<size_t>(rank) * kMaxPeerRegions + region];
  std::atomic_ref(entry).store(data, std::memory_order_release);
}

void CudaRegions::set_entry(int rank, uint32_t region, std::byte* data) {
  const CudaDeviceGuard guard(device_, context());
  show_entry(rank, region, data);
  const size_t index = static_cast<size_t>(rank) * kMaxPeerRegions + region;
  std::byte** const from = new_table_.get() + index;
  std::byte** const to = table_.get() + index;
  const cudaStream_t stream = short_work_stream(device_);
  WEFT_CUDA(context(), cudaMemcpyAsync(to, from, sizeof *to, cudaMemcpyHostToDevice, stream));
  WEFT_CUDA(context(), cudaStreamSynchronize(stream));
}

void CudaRegions::quiesce() {
  const CudaDeviceGuard guard(device_, context());
  WEFT_CUDA(context(), cudaDeviceSynchronize());
}

bool CudaRegions::is_exported() const {
  const auto is_apart = [&](const GpuIdentity& gpu) { return !own().is_same_process(gpu); };
  return std::ranges::any_of(gpus_, is_apart);
}

int CudaRegions::ranks_on_this_gpu() const {
  const auto is_here = [&](const GpuIdentity& gpu) { return own().is_same_gpu(gpu); };
  return static_cast<int>(std::ranges::count_if(gpus_, is_here));
}

PeerMemory::~PeerMemory() {
  try {
    close();
    const auto deadline = std::chrono::steady_clock::now() + kFarewell;
    while (is_exported() && !is_unmapped_by_peers() && std::chrono::steady_clock::now() < deadline
    ) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (is_exported() && !is_unmapped_by_peers()) {
      log(LogLevel::kWarn, "peer memory: a rank still uses what is closed here; it is not freed");
      keep_memory();
    }
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: close: {}", error.what());
  }
}

}  // namespace weft
