// SPDX-License-Identifier: Apache-2.0
// Codes and decodes rows of sums (Wire of weft/calls.hpp; call/wire.hpp has the layout) in a warp's
// registers, and adds rows of one kind to a row of another. coded.cu does so in the two roles of
// combine, hosts/message_rows.cu with what other domains send back.
#pragma once

#include <cuda_fp8.h>

#include "call/wire.hpp"
#include "cuda/combine/row_sum.cuh"

namespace weft {

// A lane has 8 neighbouring elements of each step, 16 lanes have a group.
inline constexpr int kLaneElements = 8;
inline constexpr int kStepElements = kWarpLanes * kLaneElements;
inline constexpr int kGroupLanes = kQuantiseGroup / kLaneElements;
inline constexpr int kPieceElements = kSumVectors * kStepElements;
static_assert(kStepElements % kQuantiseGroup == 0 && BFloat16::kPerVector == kLaneElements);

// A warp's elements of every row: whole groups.
struct ElementSpan {
  int32_t first;
  int32_t last;
};

// The kinds of rows. `element` is the first of this lane's. Without `is_inside` a lane reads and
// writes nothing, but all lanes of a warp call.

struct PlainRows {
  struct Vector {
    uint4 bits = {0, 0, 0, 0};
  };

  [[nodiscard]] __device__ __forceinline__ Vector
  load(const std::byte* row, int element, bool is_inside) const {
    return is_inside ? Vector{ptx::load_16(row + element * 2)} : Vector{};
  }
  static __device__ __forceinline__ void unpack(
      const Vector& vector, float (&values)[kLaneElements]
  ) {
    weft::unpack<BFloat16>(vector.bits, values);
  }
  __device__ __forceinline__ void store(
      std::byte* row, int element, bool is_inside, const float (&values)[kLaneElements]
  ) const {
    if (is_inside) {
      ptx::store_16(row + element * 2, pack<BFloat16>(values));
    }
  }
};

template <Wire kWire>
struct CodedRows {
  static constexpr bool kIsFp8 = kWire == Wire::kFp8;
  int32_t hidden;

  // Codes of a lane's elements; unread ones stand for zeros.
  struct Vector {
    uint2 codes = {0, 0};
    uint32_t upper = 0;  // two bits of each
    uint32_t head = 0;
  };

  [[nodiscard]] __device__ __forceinline__ Vector
  load(const std::byte* row, int element, bool is_inside) const {
    Vector vector;
    if (is_inside) {
      vector.codes = ptx::load_8(row + element);
      if constexpr (!kIsFp8) {
        vector.upper = *reinterpret_cast<const uint16_t*>(row + hidden + element / 4);
      }
      vector.head = *reinterpret_cast<const uint32_t*>(head_of(row, element));
    }
    return vector;
  }

  static __device__ __forceinline__ void unpack(
      const Vector& vector, float (&values)[kLaneElements]
  ) {
    const LogGroup group(vector.head);
#pragma unroll
    for (int i = 0; i < kLaneElements; i += 2) {
      const uint32_t two = (i < 4 ? vector.codes.x : vector.codes.y) >> i % 4 * 8;
      if constexpr (kIsFp8) {
        const float scale = __uint_as_float(vector.head);
        const __half2_raw halves =
            __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(two & 0xffffU), __NV_E4M3);
        const float2 pair = __half22float2(halves);
        values[i] = __fmul_rn(pair.x, scale);
        values[i + 1] = __fmul_rn(pair.y, scale);
      } else {
        const uint32_t upper = vector.upper >> 2 * i;
        values[i] = __uint_as_float(log_bits((upper & 3U) << 8 | (two & 0xffU), group));
        values[i + 1] =
            __uint_as_float(log_bits((upper >> 2 & 3U) << 8 | (two >> 8 & 0xffU), group));
      }
    }
  }

  __device__ __forceinline__ void store(
      std::byte* row, int element, bool is_inside, const float (&values)[kLaneElements]
  ) const {
    uint32_t largest = 0;
    uint32_t least = ~0U;
#pragma unroll
    for (const float value : values) {
      const uint32_t magnitude = __float_as_uint(value) & kMagnitude;
      largest = max(largest, magnitude);
      least = min(least, magnitude - 1);  // zero is no least
    }
#pragma unroll
    for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
      least = min(least, __shfl_xor_sync(kAllLanes, least, lanes));
    }
    const Vector vector = kIsFp8 ? fp8_of(values, largest) : log_of(values, least + 1, largest);
    if (!is_inside) {
      return;
    }
    *reinterpret_cast<uint2*>(row + element) = vector.codes;
    if constexpr (!kIsFp8) {
      *reinterpret_cast<uint16_t*>(row + hidden + element / 4) =
          static_cast<uint16_t>(vector.upper);
    }
    if (element % kQuantiseGroup == 0) {
      *reinterpret_cast<uint32_t*>(const_cast<std::byte*>(head_of(row, element))) = vector.head;
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ const std::byte* head_of(
      const std::byte* row, int element
  ) const {
    return row + wire_heads(kWire, hidden) + element / kQuantiseGroup * sizeof(uint32_t);
  }

  static __device__ __forceinline__ Vector
  fp8_of(const float (&values)[kLaneElements], uint32_t largest) {
    const float scale = wire_scale(largest);
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kLaneElements; i += 2) {
      const float2 pair = {values[i] / scale, values[i + 1] / scale};
      const uint32_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
      words[i / 4] |= two << i % 4 * 8;
    }
    return {{words[0], words[1]}, 0, __float_as_uint(scale)};
  }

  static __device__ __forceinline__ Vector
  log_of(const float (&values)[kLaneElements], uint32_t least, uint32_t largest) {
    const uint32_t head = log_head(least, largest);
    uint32_t words[2] = {0, 0};
    uint32_t upper = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const uint32_t code = log_code(__float_as_uint(values[i]), head);
      words[i / 4] |= (code & 0xffU) << i % 4 * 8;
      upper |= code >> 8 << 2 * i;
    }
    return {{words[0], words[1]}, upper, head};
  }
};

// One warp adds the rows of one entry of an item one after the other, loaded one ahead. next()
// returns a row and sets its factor.
template <bool kScaled, class From, class To, class Next>
__device__ __forceinline__ void add_entry(
    const From& from,
    const To& to,
    const ElementSpan& piece,
    int num_rows,
    std::byte* out,
    const Next& next
) {
  struct Loaded {
    typename From::Vector vectors[kSumVectors];
    float scale = 1;
  };
  const auto element = [&](int i) {
    return piece.first + i * kStepElements + lane_index() * kLaneElements;
  };
  const auto load = [&] {
    Loaded loaded;
    const std::byte* row = next(loaded.scale);
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      loaded.vectors[i] = from.load(row, element(i), element(i) < piece.last);
    }
    return loaded;
  };
  float sums[kSumVectors][kLaneElements] = {};
  Loaded ahead;
  if (num_rows > 0) {
    ahead = load();
  }
  for (int row = 0; row < num_rows; ++row) {
    const Loaded now = ahead;
    if (row + 1 < num_rows) {
      ahead = load();
    }
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      float values[kLaneElements];
      From::unpack(now.vectors[i], values);
#pragma unroll
      for (int j = 0; j < kLaneElements; ++j) {
        const float term = kScaled ? __fmul_rn(values[j], now.scale) : values[j];
        sums[i][j] = row == 0 ? term : __fadd_rn(sums[i][j], term);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSumVectors; ++i) {
    to.store(out, element(i), element(i) < piece.last, sums[i]);
  }
}

}  // namespace weft
