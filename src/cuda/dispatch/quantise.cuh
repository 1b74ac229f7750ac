// SPDX-License-Identifier: Apache-2.0
// Quantises bf16 rows to FP8 on their way through registers, by the rule of call/quantise.hpp. The
// push role (push.cuh) does it before it stores a row.
#pragma once

#include <cuda_fp8.h>

#include "call/quantise.hpp"
#include "core/half.hpp"
#include "cuda/device/row_mover.cuh"

namespace weft {

__device__ inline uint8_t to_fp8(float value, float scale, Quantise kind) {
  return __nv_cvt_float_to_fp8(
      value / scale, __NV_SATFINITE, kind == Quantise::kE4M3 ? __NV_E4M3 : __NV_E5M2
  );
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

// One warp quantises a row: 16 lanes hold one group, 8 elements each.
__device__ inline void quantise_row(
    Quantise kind,
    const std::byte* row,
    int64_t row_bytes,
    const Targets& targets,
    std::byte* scale_target
) {
  for (int64_t begin = 0; begin < row_bytes; begin += kWarpLanes * 16) {
    const int64_t at = begin + lane_index() * 16;
    const bool is_inside = at < row_bytes;
    uint4 bits = is_inside ? ptx::load_16(row + at) : uint4{0, 0, 0, 0};
    const auto* halves = reinterpret_cast<const uint16_t*>(&bits);
    float values[8];
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = bf16_to_float(halves[i]);
      largest = fmaxf(largest, fabsf(values[i]));
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    }
    const float scale = scale_of(largest, kind);
    uint64_t packed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      packed |= static_cast<uint64_t>(to_fp8(values[i], scale, kind)) << (8 * i);
    }
    for_each_target(targets, [&](std::byte* target) {
      if (is_inside) {
        *reinterpret_cast<uint64_t*>(target + at / 2) = packed;
      }
    });
    for_each_target({scale_target, nullptr}, [&](std::byte* target) {
      if (is_inside && lane_index() % 16 == 0) {
        reinterpret_cast<float*>(target)[at / 2 / kQuantiseGroup] = scale;
      }
    });
  }
}

}  // namespace weft
