// SPDX-License-Identifier: Apache-2.0
// Where the fan-out role finds what sources have pushed for an item, but for rows in their primary
// slots: in this rank's staging, closely packed by arrival; or among its early rows, by token.
#pragma once

#include "kernels/dispatch_extras.cuh"
#include "kernels/launch.hpp"
#include "kernels/staged_rows.hpp"

namespace weft {

template <bool kIsEarly>
class StagedItems {
 public:
  __device__ StagedItems(const DispatchLaunch& call, const CallSetup& setup)
      : call_(call), setup_(setup) {}

  // Each the first of the item's arrivals; the others follow.
  [[nodiscard]] __device__ __forceinline__ const std::byte* rows(
      const ArrivalRecords& records, int64_t row_bytes
  ) const {
    const std::byte* all = kIsEarly ? own() + map().early_rows_offset(setup_.epoch)
                                    : static_cast<const std::byte*>(call_.staged_rows);
    return all + place(records) * row_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ const std::byte* scales(const ArrivalRecords& records
  ) const {
    const std::byte* all = kIsEarly ? own() + map().early_scales_offset(setup_.epoch)
                                    : static_cast<const std::byte*>(call_.staged_scales);
    return all + place(records) * staged_scale_bytes(call_.scale_bytes);
  }

  [[nodiscard]] __device__ __forceinline__ const float* weights(const ArrivalRecords& records
  ) const {
    const auto source = static_cast<uint32_t>(records.source);
    const uint64_t all =
        kIsEarly ? map().early_weights_offset(setup_.epoch, source) : map().weights_offset(source);
    const int64_t arrival = kIsEarly ? records.chunk : records.begin;
    return reinterpret_cast<const float*>(own() + all) + arrival * map().max_topk;
  }

 private:
  [[nodiscard]] __device__ __forceinline__ const DeviceControlMap& map() const {
    return call_.me.map;
  }
  [[nodiscard]] __device__ __forceinline__ const std::byte* own() const {
    return control_of(call_.me, call_.me.rank);
  }
  // A chunk of early rows is one token.
  [[nodiscard]] __device__ __forceinline__ int64_t place(const ArrivalRecords& records) const {
    return kIsEarly ? static_cast<int64_t>(records.source) * map().max_tokens + records.chunk
                    : setup_.received_base[records.source] + records.begin;
  }

  const DispatchLaunch& call_;
  const CallSetup& setup_;
};

}  // namespace weft
