// SPDX-License-Identifier: Apache-2.0
#include "transport/peer/cuda_regions.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/check_cuda.hpp"
#include "core/peer_address.hpp"
#include "core/scope_cuda.hpp"
#include "transport/agree.hpp"
#include "transport/peer/cuda_handle.hpp"

namespace weft {

CudaRegions::CudaRegions(const Group& group, int device)
    : rank_(group.rank()), num_ranks_(group.num_ranks()), device_(device) {
  gpus_ = gather_identities(group, device);
  agree(group, [&] { check_reach(); });
  try {
    agree(group, [&] {
      WEFT_CUDA(context(), cudaSetDevice(device_));
      enable_access();
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
    const std::string problem =
        reach_obstacle(gpus_[static_cast<size_t>(rank_)], gpus_[static_cast<size_t>(rank)], rank);
    WEFT_CHECK(context(), problem.empty(), ErrorCode::kNotAvailable, "open: {}", problem);
  }
}

// Other GPUs of this process; those of other processes follow when their memory is mapped.
void CudaRegions::enable_access() const {
  const GpuIdentity& own = gpus_[static_cast<size_t>(rank_)];
  for (const GpuIdentity& other : gpus_) {
    if (!own.is_same_process(other) || own.is_same_gpu(other)) {
      continue;
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(other.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(cudaGetLastError());
    } else if (status != cudaSuccess) {
      raise_cuda_error(status, "cudaDeviceEnablePeerAccess", context());
    }
  }
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
  const auto& own = gpus_[static_cast<size_t>(rank_)];
  const bool is_exported =
      std::ranges::any_of(gpus_, [&](const GpuIdentity& gpu) { return !own.is_same_process(gpu); });
  OwnRegion region = make_cuda_region(bytes, is_exported, context());
  const std::lock_guard lock(stream_mutex_);
  WEFT_CUDA(context(), cudaMemsetAsync(region.data.get(), 0, bytes, stream_.get()));
  WEFT_CUDA(context(), cudaStreamSynchronize(stream_.get()));
  return region;
}

std::shared_ptr<std::byte> CudaRegions::map(int rank, const RegionHandle& handle) {
  const auto& own = gpus_[static_cast<size_t>(rank_)];
  if (own.is_same_process(gpus_[static_cast<size_t>(rank)])) {
    auto data = find_cuda_region(handle);
    WEFT_CHECK(
        context(),
        data != nullptr,
        ErrorCode::kNotAvailable,
        "map: a region of rank {} is already gone",
        rank
    );
    return data;
  }
  const CudaDeviceGuard guard(device_, context());
  return open_cuda_region(handle, rank, context());
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
  const auto& own = gpus_[static_cast<size_t>(rank_)];
  return own.is_same_process(gpus_.at(static_cast<size_t>(rank))) ? "same process" : "ipc";
}

bool CudaRegions::is_exported() const {
  const auto& own = gpus_[static_cast<size_t>(rank_)];
  return std::ranges::any_of(gpus_, [&](const GpuIdentity& gpu) {
    return !own.is_same_process(gpu);
  });
}

int CudaRegions::ranks_on_this_gpu() const {
  const auto& own = gpus_[static_cast<size_t>(rank_)];
  return static_cast<int>(std::ranges::count_if(gpus_, [&](const GpuIdentity& gpu) {
    return own.is_same_gpu(gpu);
  }));
}

}  // namespace weft
