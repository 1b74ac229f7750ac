// SPDX-License-Identifier: Apache-2.0
// Device memory that the other GPUs of a domain load and store: the regions of peer_regions.hpp,
// made and mapped by the GPU transport that the environment names. The exchange and its pools of
// memory (exchange/, memory/, plan/) own it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/gpu/stream.hpp"
#include "cuda/memory/owners.hpp"
#include "cuda/transport/gpu_transport.hpp"
#include "cuda/transport/peer_regions.hpp"
#include "weft/group.hpp"

namespace weft {

// Process and GPU of a rank. Trivially copyable; travels between ranks.
struct GpuIdentity {
  uint64_t pid = 0;
  uint64_t process_id = 0;  // random, for processes of one number in different containers
  int32_t device = -1;      // as its process counts; -1: see problem
  int32_t padding = 0;
  std::array<std::byte, 16> uuid = {};
  std::array<char, 224> problem = {};  // why this rank has no such GPU

  [[nodiscard]] bool is_same_process(const GpuIdentity& other) const {
    return pid == other.pid && process_id == other.process_id;
  }
  [[nodiscard]] bool is_same_gpu(const GpuIdentity& other) const { return uuid == other.uuid; }
};

// Collective. Returns the identities of all ranks, by rank. Does not throw for lack of a GPU
// `device`.
[[nodiscard]] std::vector<GpuIdentity> gather_identities(const Group& group, int device);

// Regions in GPU memory, and the table of them that kernels read. Peers of the same process use
// each other's memory as it is, other processes map it.
class CudaRegions : public RegionSource {
 public:
  // Collective, as meet() is.
  CudaRegions(const Group& group, int device, std::string_view transport, const Meeting& who);

  // Collective. Throws the same Error on every
  // rank: kNotAvailable if a GPU cannot reach another or a machine does not allow the transport,
  // kInvalidArgument if no transport has that name.
  void meet(const Group& group, const Meeting& who);

  void enter_thread() override;
  [[nodiscard]] OwnRegion allocate(uint64_t bytes) override;
  [[nodiscard]] std::shared_ptr<std::byte> map(int rank, const RegionHandle& handle) override;
  [[nodiscard]] std::shared_ptr<std::byte> map_instead(
      std::shared_ptr<std::byte> mapping, int rank, const RegionHandle& handle
  ) override;
  void show_entry(int rank, uint32_t region, std::byte* data) override;
  void set_entry(int rank, uint32_t region, std::byte* data) override;
  void quiesce() override;

  // Returns device memory [num_ranks][kMaxPeerRegions]: each region as this GPU maps it, null = not
  // mapped.
  [[nodiscard]] std::byte* const* table() const { return table_.get(); }
  // Returns the copy of table() in host memory that kernels can read: it gets entries first.
  [[nodiscard]] std::byte* const* new_table() const { return new_table_.get(); }
  // Returns how many ranks, this one included, have this rank's GPU.
  [[nodiscard]] int ranks_on_this_gpu() const;
  // Returns whether other processes map this rank's memory.
  [[nodiscard]] bool is_exported() const;

 private:
  [[nodiscard]] Context context() const { return {.rank = rank_, .num_ranks = num_ranks_}; }
  [[nodiscard]] const GpuIdentity& own() const { return gpus_[static_cast<size_t>(rank_)]; }
  std::vector<int> enable_access() const;
  [[nodiscard]] bool is_here(int rank) const {
    return own().is_same_process(gpus_[static_cast<size_t>(rank)]);
  }

  int rank_;
  int num_ranks_;
  int device_;
  std::string name_;
  std::vector<GpuIdentity> gpus_;  // [num_ranks]; empty where no member ever was
  uint32_t were_apart_ = 0;        // bit r: rank r's memory was mapped by the transport
  std::unique_ptr<GpuTransport> transport_;

  CudaBuffer<std::byte*> table_;        // [num_ranks][kMaxPeerRegions]
  PinnedBuffer<std::byte*> new_table_;  // the same
};

class PeerMemory final : CudaRegions, public PeerRegions {
 public:
  // Collective; makes `device` current on this thread. Region 0 of every rank is `control_bytes` of
  // zeroed memory, mapped everywhere when this returns. `transport` is one of
  // gpu_transport_names(); empty: as WEFT_GPU_TRANSPORT says. Throws the same Error on every rank,
  // as CudaRegions does.
  PeerMemory(
      const Group& group,
      int device,
      uint64_t control_bytes,
      std::string_view transport = {},
      const Meeting& who = {}
  )
      : CudaRegions(group, device, transport, who),
        PeerRegions(group, static_cast<RegionSource&>(*this), control_bytes, who) {}
  ~PeerMemory();  // waits for a moment until peers have unmapped this rank's memory
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Collective, once newcomers have taken lost ranks' places, while no kernel runs. All ranks then
  // map each other's control regions again, and newcomers map all that the others have. Throws
  // Error as the constructor does, and what the group throws when another rank is lost meanwhile;
  // then it may be called again.
  void meet(const Group& group, const Meeting& who) {
    CudaRegions::meet(group, who);
    PeerRegions::meet(group, who);
  }

  using CudaRegions::new_table;
  using CudaRegions::ranks_on_this_gpu;
  using CudaRegions::table;
  using PeerRegions::allocate;
};

}  // namespace weft
