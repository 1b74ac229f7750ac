// SPDX-License-Identifier: Apache-2.0
// Quantises bf16 rows to FP8 on their way through registers, by the rule of call/quantise.hpp. The
// push role (push.cuh) does it before it stores a row.
#pragma once

#include <cuda_fp8.h>

#include "call/quantise.hpp"
#include "core/half.hpp"
#include "cuda/device/row_mover.cuh"

namespace weft {

// Two elements, the first in the low byte.
__device__ inline uint16_t to_fp8(float2 values, Quantise kind) {
  const __nv_fp8_interpretation_t format = kind == Quantise::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  return __nv_cvt_float2_to_fp8x2(values, __NV_SATFINITE, format);
}

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

// Bytes of bf16 that a warp quantises at a time: two groups.
inline constexpr int32_t kQuantiseStep = kWarpLanes * 16;
static_assert(kQuantiseStep == 2 * kQuantiseGroup * sizeof(uint16_t));

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

// One warp quantises its share of a row: 16 lanes hold one group, 8 elements each.
__device__ inline void quantise_row(
    const PayloadFormat& payload,
    const std::byte* row,
    const QuantiseSpan& span,
    const Targets& targets,
    std::byte* scale_target
) {
  constexpr int kAhead = 4;  // loads in flight; a guess
  const Quantise kind = payload.quantise;
  for (int32_t begin = span.first; begin < span.last; begin += kAhead * kQuantiseStep) {
    uint4 loaded[kAhead];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const int32_t at = begin + step * kQuantiseStep + lane_index() * 16;
      loaded[step] = at < span.last ? ptx::load_16(row + at) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const int32_t at = begin + step * kQuantiseStep + lane_index() * 16;
      const bool is_inside = at < span.last;
      const auto* halves = reinterpret_cast<const uint16_t*>(loaded + step);
      float values[8];
      float largest = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        values[i] = bf16_to_float(halves[i]);
        largest = fmaxf(largest, fabsf(values[i]));
      }
#pragma unroll
      for (int lanes = 8; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
      }
      const float scale = scale_of(largest, kind, payload.scale_rule);
      uint64_t packed = 0;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float2 pair = {values[i] / scale, values[i + 1] / scale};
        packed |= static_cast<uint64_t>(to_fp8(pair, kind)) << (8 * i);
      }
      for_each_target(targets, [&](std::byte* target) {
        if (is_inside) {
          *reinterpret_cast<uint64_t*>(target + at / 2) = packed;
        }
      });
      for_each_target({scale_target, nullptr}, [&](std::byte* target) {
        if (is_inside && lane_index() % 16 == 0) {
          const int32_t group = at / 2 / kQuantiseGroup;
          if (payload.scale_rule == ScaleRule::kUe8m0) {
            reinterpret_cast<uint8_t*>(target)[group] = ue8m0_of(scale);
          } else {
            reinterpret_cast<float*>(target)[group] = scale;
          }
        }
      });
    }
  }
}

}  // namespace weft
