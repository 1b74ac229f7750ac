// SPDX-License-Identifier: Apache-2.0
// Quantises bf16 rows on their way through registers, by the rules of call/quantise.hpp, mxfp8.hpp
// and nvfp4.hpp. The push role (push.cuh) does it before it stores a row.
#pragma once

#include <cuda_fp8.h>

#include "call/mxfp8.hpp"
#include "call/nvfp4.hpp"
#include "call/quantise.hpp"
#include "core/half.hpp"
#include "cuda/device/row_mover.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// All lanes of a warp copy `bytes` of any number, four at a time where everything is aligned to
// four.
__device__ __forceinline__ void copy_bytes_warp(
    std::byte* to, const std::byte* from, int64_t bytes
) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(bytes);
  if (bits % sizeof(uint32_t) == 0) {
    for (int64_t i = lane_index(); i < bytes / 4; i += kWarpLanes) {
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    }
    return;
  }
  for (int64_t i = lane_index(); i < bytes; i += kWarpLanes) {
    to[i] = from[i];
  }
}

// Elements that a lane has in hand, and bytes of bf16 that a warp quantises at a time: two groups
// of FP8.
inline constexpr int kLaneElements = 8;
inline constexpr int32_t kQuantiseStep = kWarpLanes * kLaneElements * sizeof(uint16_t);
static_assert(kQuantiseStep == 2 * kQuantiseGroup * sizeof(uint16_t));

using LaneValues = float[kLaneElements];

// --- formats: lanes of a group find its scale, and each packs its elements ---

// Packs eight FP8 numbers, the first in the low byte. quantised(value) is what is rounded.
template <__nv_fp8_interpretation_t kFormat, class Quantised>
__device__ __forceinline__ uint64_t pack_fp8(const LaneValues& values, const Quantised& quantised) {
  uint64_t packed = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    const float2 pair = {quantised(values[i]), quantised(values[i + 1])};
    const uint16_t two = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kFormat);
    packed |= static_cast<uint64_t>(two) << (8 * i);
  }
  return packed;
}

class Fp8Rows {
 public:
  using Scale = Fp8Scale;
  static constexpr int kGroup = kQuantiseGroup;

  __device__ explicit Fp8Rows(const DispatchLaunch& call) : payload_(call.payload) {}

  [[nodiscard]] static __device__ __forceinline__ float larger(float a, float b) {
    return fmaxf(a, fabsf(b));
  }
  [[nodiscard]] __device__ __forceinline__ Fp8Scale scale(float largest) const {
    return fp8_scale(largest, payload_.quantise, payload_.scale_rule);
  }
  [[nodiscard]] __device__ __forceinline__ uint64_t
  pack(const LaneValues& values, const Fp8Scale& scale) const {
    const auto product = [&](float value) { return product_of(value, scale.factor); };
    if (payload_.quantise == Quantise::kE5M2) [[unlikely]] {
      return pack_fp8<__NV_E5M2>(values, product);
    }
    return pack_fp8<__NV_E4M3>(values, product);
  }
  // Stores the scale of the group whose first lane this is.
  __device__ __forceinline__ void store_scale(
      std::byte* target, int32_t group, const Fp8Scale& scale
  ) const {
    if (payload_.scale_rule == ScaleRule::kUe8m0) {
      reinterpret_cast<uint8_t*>(target)[group] = ue8m0_of(scale.stored);
    } else {
      reinterpret_cast<float*>(target)[group] = scale.stored;
    }
  }

 private:
  const PayloadFormat& payload_;
};

// Common part of the formats with a byte of scale for each small group.
struct BlockRows {
  using Scale = BlockScale;

  [[nodiscard]] static __device__ __forceinline__ float larger(float a, float b) {
    return larger_magnitude(a, b);
  }
  static __device__ __forceinline__ void store_scale(
      std::byte* target, int32_t group, const BlockScale& scale
  ) {
    reinterpret_cast<uint8_t*>(target)[group] = scale.stored;
  }
};

struct Mxfp8Rows : BlockRows {
  static constexpr int kGroup = stored_format(Quantise::kMxfp8, ScaleRule::kExact).group;

  __device__ explicit Mxfp8Rows(const DispatchLaunch& /*call*/) {}

  [[nodiscard]] static __device__ __forceinline__ BlockScale scale(float largest) {
    return mxfp8_scale(largest);
  }
  [[nodiscard]] static __device__ __forceinline__ uint64_t
  pack(const LaneValues& values, const BlockScale& scale) {
    return pack_fp8<__NV_E4M3>(values, [&](float value) {
      return product_of(value, scale.factor);
    });
  }
};

class Nvfp4Rows : public BlockRows {
 public:
  static constexpr int kGroup = stored_format(Quantise::kNvfp4, ScaleRule::kExact).group;

  // An invalid global scale makes all scales NaNs and is told to the host.
  __device__ explicit Nvfp4Rows(const DispatchLaunch& call)
      : rule_(call.payload.scale_rule),
        global_scale_(call.global_scale == nullptr ? 1.0F : *call.global_scale) {
    if (!is_global_scale(global_scale_)) [[unlikely]] {
      const FaultRecord fault = {
          .kind = FaultKind::kBadGlobalScale,
          .op = Op::kDispatch,
          .epoch = call.me.local->epoch + 1,
          .peer = call.me.rank,
          .seen = __float_as_uint(global_scale_)};
      tell_misuse(call.me, fault);
      global_scale_ = __int_as_float(0x7fffffff);
    }
  }

  [[nodiscard]] __device__ __forceinline__ BlockScale scale(float largest) const {
    return nvfp4_scale(largest, global_scale_, rule_);
  }
  [[nodiscard]] static __device__ __forceinline__ uint32_t
  pack(const LaneValues& values, const BlockScale& scale) {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      packed |= static_cast<uint32_t>(float_to_fp4(product_of(values[i], scale.factor))) << (4 * i);
    }
    return packed;
  }

 private:
  ScaleRule rule_;
  float global_scale_;
};

// --- rows ---

// A warp's share of a row in whole steps: [first, last) in bytes.
struct QuantiseSpan {
  int32_t first;
  int32_t last;
};

__device__ __forceinline__ QuantiseSpan quantise_span(int64_t row_bytes, int warp, int warps) {
  const auto bytes = static_cast<int32_t>(row_bytes);
  const int32_t steps = (bytes + kQuantiseStep - 1) / kQuantiseStep;
  return {
      steps * warp / warps * kQuantiseStep, min(bytes, steps * (warp + 1) / warps * kQuantiseStep)};
}

// Quantises, by one warp, its share of a row: kGroupLanes lanes hold one group.
template <class Format>
__device__ __forceinline__ void quantise_row_as(
    const Format& format,
    const std::byte* row,
    const QuantiseSpan& span,
    const Targets& targets,
    std::byte* scale_target
) {
  constexpr int kGroupLanes = Format::kGroup / kLaneElements;
  const auto load = [&](int32_t at) {
    return at < span.last ? ptx::load_16(row + at) : uint4{0, 0, 0, 0};
  };
  uint4 next = load(span.first + lane_index() * 16);
  // Not unrolled: where there are few rows, most of the time is that of fetching instructions.
#pragma unroll 1
  for (int32_t begin = span.first; begin < span.last; begin += kQuantiseStep) {
    const int32_t at = begin + lane_index() * 16;
    const uint4 loaded = next;
    next = load(at + kQuantiseStep);
    const bool is_inside = at < span.last;
    const auto* halves = reinterpret_cast<const uint16_t*>(&loaded);
    LaneValues values;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      values[i] = bf16_to_float(halves[i]);
      largest = Format::larger(largest, values[i]);
    }
#pragma unroll
    for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) {
      largest = Format::larger(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
    }
    const typename Format::Scale scale = format.scale(largest);
    const auto packed = format.pack(values, scale);
    using Packed = std::remove_const_t<decltype(packed)>;
    constexpr int32_t kShrink = 16 / sizeof(Packed);
    for_each_target(targets, [&](std::byte* target) {
      if (is_inside) {
        *reinterpret_cast<Packed*>(target + at / kShrink) = packed;
      }
    });
    for_each_target({scale_target, nullptr}, [&](std::byte* target) {
      if (is_inside && lane_index() % kGroupLanes == 0) {
        const auto element = at / static_cast<int32_t>(sizeof(uint16_t));
        format.store_scale(target, element / Format::kGroup, scale);
      }
    });
  }
}

// Quantises a row as quantise_row_as() does, by the call's format.
__device__ inline void quantise_row(
    const DispatchLaunch& call,
    const std::byte* row,
    const QuantiseSpan& span,
    const Targets& targets,
    std::byte* scale_target
) {
  switch (call.payload.quantise) {
    case Quantise::kMxfp8:
      return quantise_row_as(Mxfp8Rows(call), row, span, targets, scale_target);
    case Quantise::kNvfp4:
      return quantise_row_as(Nvfp4Rows(call), row, span, targets, scale_target);
    default:
      return quantise_row_as(Fp8Rows(call), row, span, targets, scale_target);
  }
}

}  // namespace weft
