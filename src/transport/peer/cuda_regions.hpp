// SPDX-License-Identifier: Apache-2.0
// Regions in GPU memory: plain allocations that peers of the same process use as they are and other
// processes map through CUDA IPC.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "core/context.hpp"
#include "core/stream_cuda.hpp"
#include "transport/peer/gpu_identity.hpp"
#include "transport/peer/region_source.hpp"

namespace weft {

class CudaRegions final : public RegionSource {
 public:
  // Collective. Throws the same Error (kNotAvailable) on every rank if a GPU cannot reach another.
  CudaRegions(const Group& group, int device);
  ~CudaRegions() override;
  CudaRegions(const CudaRegions&) = delete;
  CudaRegions& operator=(const CudaRegions&) = delete;

  void enter_thread() override;
  [[nodiscard]] OwnRegion allocate(uint64_t bytes) override;
  [[nodiscard]] std::shared_ptr<std::byte> map(int rank, const RegionHandle& handle) override;
  void set_entry(int rank, uint32_t region, std::byte* data) override;
  void quiesce() override;

  [[nodiscard]] std::byte* const* table() const { return table_; }
  [[nodiscard]] std::string_view how(int rank) const;
  [[nodiscard]] int ranks_on_this_gpu() const;
  // Whether other processes map this rank's memory.
  [[nodiscard]] bool is_exported() const;

 private:
  [[nodiscard]] Context context() const { return {.rank = rank_, .num_ranks = num_ranks_}; }
  void check_reach() const;
  void enable_access() const;
  void make_table();
  void free_table();

  int rank_;
  int num_ranks_;
  int device_;
  std::vector<GpuIdentity> gpus_;  // [num_ranks]

  std::mutex stream_mutex_;  // guards what follows
  GpuStream stream_;
  std::byte** table_ = nullptr;  // device memory [num_ranks][kMaxPeerRegions]
  std::byte** word_ = nullptr;   // pinned, of one entry on its way
};

}  // namespace weft
