// SPDX-License-Identifier: Apache-2.0
// The element types of rows. 16 bytes of a row become fp32 numbers (unpack) and fp32 numbers become
// 16 bytes, rounded to nearest even (pack): the arithmetic of core/half.hpp with the GPU's own
// conversions. A NaN stays a NaN; its sign and payload may differ from the CPU's.
// combine/row_sum.cuh and hosts/message_rows.cu add rows with it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "weft/tensor.hpp"

namespace weft {

struct BFloat16 {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000U);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

struct Float16 {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void unpack(uint32_t word, float& low, float& high) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    low = pair.x;
    high = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

struct Float32 {
  static constexpr int kPerVector = 4;
};

// Returns f(Element()) of the elements that `dtype` names.
template <class F>
auto with_element(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(BFloat16());
    case DType::kFloat16:
      return f(Float16());
    default:
      return f(Float32());
  }
}

template <class Element>
__device__ __forceinline__ void unpack(const uint4& bits, float (&values)[Element::kPerVector]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Element::kPerVector == 8) {
      Element::unpack(words[i], values[2 * i], values[2 * i + 1]);
    } else {
      values[i] = __uint_as_float(words[i]);
    }
  }
}

template <class Element>
__device__ __forceinline__ uint4 pack(const float (&values)[Element::kPerVector]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Element::kPerVector == 8) {
      words[i] = Element::pack(values[2 * i], values[2 * i + 1]);
    } else {
      words[i] = __float_as_uint(values[i]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace weft
