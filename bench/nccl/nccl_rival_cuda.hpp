// SPDX-License-Identifier: Apache-2.0
// The usual way to move tokens to experts and back on GPUs: permute, NCCL sends and receives,
// permute. Written with the care that a good NCCL programmer takes: buffers made once, counts known
// beforehand, no wait of the host between the steps. One thread drives all GPUs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "nccl/rival_kernels_cuda.hpp"
#include "nccl/rival_library.hpp"
#include "rival_lists.hpp"

namespace weft::bench {

// Most rows of each kind over all ranks, ways and routings.
struct RivalSizes {
  int64_t num_sent = 0;
  int64_t num_received = 0;
  int64_t num_rows = 0;
};

// One communicator and stream per GPU 0 .. num_gpus - 1; rank r is GPU r.
class NcclGroup {
 public:
  NcclGroup(const NcclLibrary& library, int num_gpus);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  [[nodiscard]] int num_gpus() const { return static_cast<int>(comms_.size()); }
  [[nodiscard]] cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)]; }
  // Sends outgoing[r] from from[r] and receives incoming[r] into to[r] on every rank's stream. The
  // messages of a pair match in order.
  void exchange(
      const std::vector<const std::byte*>& from,
      const std::vector<const std::vector<Message>*>& outgoing,
      const std::vector<std::byte*>& to,
      const std::vector<const std::vector<Message>*>& incoming,
      int64_t row_bytes
  );

 private:
  const NcclLibrary& library_;
  std::vector<NcclComm> comms_;
  std::vector<cudaStream_t> streams_;
};

// One way with one routing: its lists on the GPUs.
class RivalPlan {
 public:
  RivalPlan(RivalWay way, std::vector<RivalLists> lists);  // by rank
  ~RivalPlan();
  RivalPlan(RivalPlan&& other) noexcept;
  RivalPlan& operator=(RivalPlan&&) = delete;

  struct OnDevice {
    DeviceLists permute;
    DeviceLists place;
    DeviceLists padding;
  };
  [[nodiscard]] RivalWay way() const { return way_; }
  [[nodiscard]] const RivalLists& lists(int rank) const {
    return lists_[static_cast<size_t>(rank)];
  }
  [[nodiscard]] const OnDevice& on_device(int rank) const {
    return on_device_[static_cast<size_t>(rank)];
  }

 private:
  RivalWay way_;
  std::vector<RivalLists> lists_;
  std::vector<OnDevice> on_device_;
  std::vector<void*> memory_;
};

// The matrices of all ranks.
class NcclRival {
 public:
  NcclRival(NcclGroup& group, const RivalCase& shape, const RivalSizes& sizes);
  ~NcclRival();
  NcclRival(const NcclRival&) = delete;
  NcclRival& operator=(const NcclRival&) = delete;

  // Asynchronous on all streams: tokens -> experts, and the sums of experts -> out.
  void dispatch(const RivalPlan& plan);
  void combine(const RivalPlan& plan);
  // One step alone on rank 0, without communication.
  void permute(const RivalPlan& plan, int rank);    // tokens -> sent
  void place(const RivalPlan& plan, int rank);      // received -> experts, padding included
  void take_back(const RivalPlan& plan, int rank);  // experts -> received
  void sum(const RivalPlan& plan, int rank);        // sent -> out

  // Device memory of a rank.
  struct Matrices {
    std::byte* tokens = nullptr;    // [num_tokens]
    std::byte* sent = nullptr;      // [num_sent]
    std::byte* received = nullptr;  // [num_received]
    std::byte* experts = nullptr;   // [num_rows]
    std::byte* out = nullptr;       // [num_tokens]
  };
  [[nodiscard]] const Matrices& matrices(int rank) const {
    return matrices_[static_cast<size_t>(rank)];
  }
  [[nodiscard]] const RivalCase& shape() const { return shape_; }
  [[nodiscard]] NcclGroup& group() { return group_; }

 private:
  void travel(const RivalPlan& plan, bool is_forward);

  NcclGroup& group_;
  RivalCase shape_;
  std::vector<Matrices> matrices_;
};

}  // namespace weft::bench
