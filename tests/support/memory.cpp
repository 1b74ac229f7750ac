// SPDX-License-Identifier: Apache-2.0
#include "support/memory.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/half.hpp"

namespace weft::test {
namespace {

bool is_all_canary(const std::byte* begin, const std::byte* end) {
  return std::all_of(begin, end, [](std::byte value) { return value == kCanary; });
}

}  // namespace

bool Matrix::has_guards_untouched() const {
  const auto guard = static_cast<size_t>(kGuardRows * cols_ * dtype_bytes(dtype_));
  const std::byte* end = bytes_.data() + bytes_.size();
  return is_all_canary(bytes_.data(), bytes_.data() + guard) && is_all_canary(end - guard, end);
}

void fill_canary(const Tensor& tensor) {
  std::fill_n(tensor.data, tensor.num_bytes(), kCanary);
}

bool is_canary(const Tensor& tensor) {
  return is_all_canary(tensor.data, tensor.data + tensor.num_bytes());
}

Matrix random_bits(DType dtype, int64_t rows, int64_t cols, RandomSource& random) {
  Matrix matrix(dtype, rows, cols);
  const Tensor view = matrix.view();
  const auto bytes = static_cast<size_t>(view.num_bytes());
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(view.data + i, &word, std::min(sizeof word, bytes - i));
  }
  return matrix;
}

Matrix random_values(DType dtype, int64_t rows, int64_t cols, RandomSource& random) {
  Matrix matrix(dtype, rows, cols);
  for (size_t i = 0; i < matrix.num_elements(); ++i) {
    const bool is_fp16 = dtype == DType::kFloat16;  // whose range is narrow
    const auto exponent = static_cast<int>(random.between(is_fp16 ? -14 : -20, is_fp16 ? 8 : 20));
    const float value = std::ldexp(random.uniform() * 2 - 1, exponent);
    switch (dtype) {
      case DType::kBFloat16:
        matrix.as<uint16_t>()[i] = float_to_bf16(value);
        break;
      case DType::kFloat16:
        matrix.as<uint16_t>()[i] = float_to_fp16(value);
        break;
      default:
        matrix.as<float>()[i] = value;
    }
  }
  return matrix;
}

}  // namespace weft::test
