// SPDX-License-Identifier: Apache-2.0
// Where the fan-out role finds what sources have pushed, and when: in this rank's staging, closely
// packed by arrival, but for rows that are in their primary slots.
#pragma once

#include "kernels/dispatch_extras.cuh"
#include "kernels/launch.hpp"
#include "kernels/staged_rows.hpp"

namespace weft {

class StagedItems {
 public:
  __device__ StagedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

  // One warp, every lane: until the item is here. False if the call is given up.
  [[nodiscard]] __device__ __forceinline__ bool wait(const ArrivalRecords& records) const {
    const RankView& me = call_.me;
    const auto slot = me.map.signals().dispatch(
        static_cast<uint32_t>(records.source), static_cast<uint32_t>(records.chunk)
    );
    const WaitSite site = {DeviceOp::kDispatch, setup_.epoch, records.source, WaitFor::kRows};
    return wait_reached_warp(me, signal_of(me, me.rank, slot), setup_.epoch, site);
  }

  // Whether rows are here too.
  [[nodiscard]] __device__ __forceinline__ bool has_rows() const {
    return call_.place == DevicePlace::kStaging;
  }

  // Each the first of the item's arrivals; the others follow.
  [[nodiscard]] __device__ __forceinline__ const std::byte* rows(
      const ArrivalRecords& records, int64_t row_bytes
  ) const {
    return call_.staged_rows + place(records) * row_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const ArrivalRecords& records
  ) const {
    return call_.staged_scales + place(records) * staged_scale_bytes(call_.scale_bytes);
  }

  [[nodiscard]] __device__ __forceinline__ const float* weights(const ArrivalRecords& records
  ) const {
    const RankView& me = call_.me;
    const uint64_t all = me.map.weights_offset(static_cast<uint32_t>(records.source));
    return reinterpret_cast<const float*>(control_of(me, me.rank) + all) +
           static_cast<int64_t>(records.begin) * me.map.max_topk;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ int64_t place(const ArrivalRecords& records) const {
    return setup_.received_base[records.source] + records.begin;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
};

}  // namespace weft
