// SPDX-License-Identifier: Apache-2.0
// Where the fan-out role finds what sources have pushed, but for rows in their primary slots: in
// this rank's staging, closely packed by arrival.
#pragma once

#include "kernels/dispatch_extras.cuh"
#include "kernels/launch.hpp"
#include "kernels/staged_rows.hpp"

namespace weft {

class StagedItems {
 public:
  __device__ StagedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

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
