// SPDX-License-Identifier: Apache-2.0
// What one rank sends another in a call by copy engines, as it lies in memory on both sides: rows,
// then scale rows, then weights, each by arrival. For host and device. call.cuh packs it,
// copies.cpp copies it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call/payload.hpp"

namespace weft {

// Combine's sum role packs a rank (below kMaxDomainRanks) and the number of its arrival into 31
// bits.
inline constexpr int kCopiedArrivalBits = 24;

struct CopiedRows {
  int64_t row_bytes = 0;     // as it arrives
  int64_t scale_bytes = 0;   // PayloadFormat::staged_scale_bytes(); 0: none
  int64_t weight_bytes = 0;  // of all weights of an arrival; 0: none

  [[nodiscard]] WEFT_HD constexpr int64_t scales_offset(int64_t arrivals) const {
    return arrivals * row_bytes;
  }
  [[nodiscard]] WEFT_HD constexpr int64_t weights_offset(int64_t arrivals) const {
    return arrivals * (row_bytes + scale_bytes);
  }
  [[nodiscard]] WEFT_HD constexpr int64_t num_bytes(int64_t arrivals) const {
    return arrivals * (row_bytes + scale_bytes + weight_bytes);
  }
};

[[nodiscard]] inline CopiedRows copied_rows(const PayloadFormat& payload) {
  return {payload.out_row_bytes(), payload.staged_scale_bytes(), payload.weight_bytes};
}

// What the kernels of one call must know of its copies.
struct CopiedLaunch {
  CopiedRows rows;
  uint32_t number = 0;          // what SignalSlots::copied() says then, of this rank's copies
  uint32_t area = 0;            // which of every receiver's two
  std::byte* packed = nullptr;  // [num_ranks - 1] blocks of DeviceControlMap::copied_stride(), in
                                // order from the next rank on
};

}  // namespace weft
