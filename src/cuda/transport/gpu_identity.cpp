// SPDX-License-Identifier: Apache-2.0
// What CUDA says of a GPU, gathered from all ranks. peer_memory.cpp decides by it how ranks reach
// each other.
#include "cuda/transport/gpu_identity.hpp"

#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <cstring>
#include <random>
#include <span>
#include <unistd.h>

#include "core/check.hpp"

namespace weft {
namespace {

uint64_t random_process_id() {
  static const uint64_t id = [] {
    std::random_device device;
    return uint64_t{device()} << 32U | device();
  }();
  return id;
}

}  // namespace

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

std::vector<GpuIdentity> gather_identities(const Group& group, int device) {
  const GpuIdentity own = identify_gpu(device);
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(&own, 1)));
  std::vector<GpuIdentity> all(blocks.size());
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    WEFT_CHECK(
        (Context{.rank = group.rank(), .num_ranks = group.num_ranks()}),
        blocks[rank].size() == sizeof(GpuIdentity),
        ErrorCode::kInternal,
        "open: rank {} describes its GPU in {} B (expected {})",
        rank,
        blocks[rank].size(),
        sizeof(GpuIdentity)
    );
    std::memcpy(&all[rank], blocks[rank].data(), sizeof(GpuIdentity));
  }
  return all;
}

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

std::string reach_obstacle(const GpuIdentity& own, const GpuIdentity& other, int other_rank) {
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

}  // namespace weft
