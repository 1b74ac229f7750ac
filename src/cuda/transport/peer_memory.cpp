// SPDX-License-Identifier: Apache-2.0
// Chooses the GPU transport, enables access between the GPUs of this process, and keeps the table
// of regions on the GPU.
#include "cuda/transport/peer_memory.hpp"

#include <algorithm>
#include <exception>
#include <span>
#include <thread>

#include "core/check.hpp"
#include "core/env.hpp"
#include "core/gpu/check.hpp"
#include "core/local_memory.hpp"
#include "core/log.hpp"
#include "transport/agree.hpp"

namespace weft {
namespace {

// How long a rank that ends waits for other processes to unmap its memory: CUDA does not say what
// becomes of memory that is freed before. The time is a guess.
constexpr auto kFarewell = std::chrono::seconds(1);

}  // namespace

CudaRegions::CudaRegions(const Group& group, int device, std::string_view transport)
    : rank_(group.rank()), num_ranks_(group.num_ranks()), device_(device) {
  gpus_ = gather_identities(group, device);
  agree(group, [&] {
    check_reach();
    const std::string usual = Env::read().gpu_transport.value_or(gpu_transport_names().front());
    name_ = transport.empty() ? usual : transport;
  });
  agree_on_name(name_, group);
  try {
    agree(group, [&] {
      WEFT_CUDA(context(), cudaSetDevice(device_));
      transport_ = make_gpu_transport(
          name_,
          {.device = device_,
           .devices = enable_access(),
           .is_exported = is_exported(),
           .context = context()}
      );
      make_table();
    });
  } catch (...) {
    free_table();
    throw;
  }
}

CudaRegions::~CudaRegions() {
  free_table();
}

void CudaRegions::check_reach() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::string problem = reach_obstacle(own(), gpus_[static_cast<size_t>(rank)], rank);
    WEFT_CHECK(context(), problem.empty(), ErrorCode::kNotAvailable, "open: {}", problem);
  }
}

// GPUs of this process, this rank's included, once each; those of other processes follow when their
// memory is mapped.
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

void CudaRegions::make_table() {
  const uint64_t bytes = sizeof(std::byte*) * static_cast<uint64_t>(num_ranks_) * kMaxPeerRegions;
  stream_ = GpuStream(device_);
  WEFT_CUDA(context(), cudaMallocHost(reinterpret_cast<void**>(&word_), sizeof *word_));
  WEFT_CUDA(context(), cudaMalloc(reinterpret_cast<void**>(&table_), bytes));
  WEFT_CUDA(context(), cudaMemsetAsync(table_, 0, bytes, stream_.get()));
  WEFT_CUDA(context(), cudaStreamSynchronize(stream_.get()));
}

// Never throws: nobody could act on it.
void CudaRegions::free_table() {
  if (stream_.get() == nullptr) {
    return;
  }
  int before = -1;
  if (cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device_) == cudaSuccess) {
    static_cast<void>(cudaFree(table_));
    static_cast<void>(cudaFreeHost(word_));
    if (before != device_) {
      static_cast<void>(cudaSetDevice(before));
    }
  }
  static_cast<void>(cudaGetLastError());
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
  const std::lock_guard lock(stream_mutex_);
  WEFT_CUDA(context(), cudaMemsetAsync(region.data.get(), 0, bytes, stream_.get()));
  WEFT_CUDA(context(), cudaStreamSynchronize(stream_.get()));
  return region;
}

std::shared_ptr<std::byte> CudaRegions::map(int rank, const RegionHandle& handle) {
  if (own().is_same_process(gpus_[static_cast<size_t>(rank)])) {
    auto data = std::static_pointer_cast<std::byte>(local_memory().find(handle.id));
    WEFT_CHECK(
        context(),
        data != nullptr,
        ErrorCode::kNotAvailable,
        "map: a region of rank {} is already gone",
        rank
    );
    return data;
  }
  return transport_->map(rank, handle.exported, handle.bytes);
}

void CudaRegions::set_entry(int rank, uint32_t region, std::byte* data) {
  const CudaDeviceGuard guard(device_, context());
  const std::lock_guard lock(stream_mutex_);
  *word_ = data;
  std::byte** const entry = table_ + static_cast<size_t>(rank) * kMaxPeerRegions + region;
  WEFT_CUDA(
      context(), cudaMemcpyAsync(entry, word_, sizeof *word_, cudaMemcpyHostToDevice, stream_.get())
  );
  WEFT_CUDA(context(), cudaStreamSynchronize(stream_.get()));
}

void CudaRegions::quiesce() {
  const CudaDeviceGuard guard(device_, context());
  WEFT_CUDA(context(), cudaDeviceSynchronize());
}

std::string_view CudaRegions::how(int rank) const {
  const GpuIdentity& other = gpus_.at(static_cast<size_t>(rank));
  return own().is_same_process(other) ? "same process" : std::string_view(name_);
}

bool CudaRegions::is_exported() const {
  return std::ranges::any_of(gpus_, [&](const GpuIdentity& gpu) {
    return !own().is_same_process(gpu);
  });
}

int CudaRegions::ranks_on_this_gpu() const {
  return static_cast<int>(std::ranges::count_if(gpus_, [&](const GpuIdentity& gpu) {
    return own().is_same_gpu(gpu);
  }));
}

// --- regions on GPUs ---

std::string PeerMemory::obstacle(const Group& group, int device) {
  std::string own = transport_obstacle("auto", group);
  const auto gpus = gather_identities(group, device);
  for (int rank = 0; rank < group.num_ranks() && own.empty(); ++rank) {
    own = reach_obstacle(
        gpus[static_cast<size_t>(group.rank())], gpus[static_cast<size_t>(rank)], rank
    );
  }
  if (own.empty() && group.num_ranks() > kMaxDomainRanks) {
    own = "too many ranks share GPU memory";
  }
  for (const Bytes& problem : group.all_gather(std::as_bytes(std::span(own)))) {
    if (!problem.empty()) {
      return {reinterpret_cast<const char*>(problem.data()), problem.size()};
    }
  }
  return {};
}

PeerMemory::~PeerMemory() {
  try {
    close();
    const auto deadline = std::chrono::steady_clock::now() + kFarewell;
    while (is_exported() && !is_unmapped_by_peers() && std::chrono::steady_clock::now() < deadline
    ) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: close: {}", error.what());
  }
}

}  // namespace weft
