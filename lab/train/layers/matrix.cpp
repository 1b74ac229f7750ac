// SPDX-License-Identifier: Apache-2.0
#include "train/layers/matrix.hpp"

#include <algorithm>

#include "core/check.hpp"
#include "core/half.hpp"

namespace weft::moe {

ConstRows as_rows(const ConstTensor& tensor, Matrix& scratch) {
  WEFT_ASSERT(tensor.is_contiguous());
  if (tensor.dtype == DType::kFloat32) {
    return {reinterpret_cast<const float*>(tensor.data), tensor.rows, tensor.cols};
  }
  WEFT_ASSERT(tensor.dtype == DType::kBFloat16);
  scratch.resize(tensor.rows, tensor.cols);
  const std::span bits(reinterpret_cast<const uint16_t*>(tensor.data), scratch.span().size());
  std::ranges::transform(bits, scratch.data(), bf16_to_float);
  return scratch;
}

ConstTensor as_tensor(ConstRows rows, DType dtype, std::vector<uint16_t>& scratch) {
  if (dtype == DType::kFloat32) {
    return matrix(rows.data, rows.rows, rows.cols);
  }
  WEFT_ASSERT(dtype == DType::kBFloat16);
  scratch.resize(static_cast<size_t>(rows.rows * rows.cols));
  std::transform(rows.data, rows.data + scratch.size(), scratch.begin(), float_to_bf16);
  return {reinterpret_cast<const std::byte*>(scratch.data()), dtype, rows.rows, rows.cols};
}

Tensor tensor_for(Matrix& m, DType dtype, std::vector<uint16_t>& scratch) {
  if (dtype == DType::kFloat32) {
    return matrix(m.data(), m.rows(), m.cols());
  }
  WEFT_ASSERT(dtype == DType::kBFloat16);
  scratch.resize(m.span().size());
  return {reinterpret_cast<std::byte*>(scratch.data()), dtype, m.rows(), m.cols()};
}

void take_values(const Tensor& filled, Matrix& m) {
  if (filled.dtype == DType::kBFloat16) {
    static_cast<void>(as_rows(filled, m));
  }
}

}  // namespace weft::moe
