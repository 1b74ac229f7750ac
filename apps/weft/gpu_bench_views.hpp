// SPDX-License-Identifier: Apache-2.0
// Other ways to see the same memory, for `weft bench` on GPUs.
#pragma once

#include <cstdint>

#include "weft/tensor.hpp"

namespace weft::program {

// As rows of as many bytes as there were elements: any bytes do.
inline Tensor as_bytes(Tensor tensor) {
  tensor.dtype = DType::kByte;
  return tensor;
}

// As rows of bf16, which is what launch_fill writes.
inline Tensor as_bf16(Tensor tensor) {
  tensor.cols = tensor.row_bytes() / static_cast<int64_t>(sizeof(uint16_t));
  tensor.dtype = DType::kBFloat16;
  return tensor;
}

// The first rows.
inline Tensor head(Tensor tensor, int64_t rows) {
  tensor.rows = rows;
  return tensor;
}

}  // namespace weft::program
