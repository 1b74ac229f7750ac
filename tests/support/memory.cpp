// SPDX-License-Identifier: Apache-2.0
#include "support/memory.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/half.hpp"

namespace weft::test {
namespace {

bool is_all_canary(const std::byte* begin, const std::byte* end) {
  const auto size = static_cast<size_t>(end - begin);
  // Each byte is like its neighbour: one call for a sanitizer to look at, not one for each byte.
  return size == 0 || (*begin == kCanary && std::memcmp(begin, begin + 1, size - 1) == 0);
}

// ldexp takes ten times as long.
float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
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
  const bool is_fp16 = dtype == DType::kFloat16;  // whose range is narrow
  const auto fill = [&](auto* values, auto of_float) {
    for (size_t i = 0; i < matrix.num_elements(); ++i) {
      const auto exponent = static_cast<int>(random.between(is_fp16 ? -14 : -20, is_fp16 ? 8 : 20));
      values[i] = of_float((random.uniform() * 2 - 1) * power_of_two(exponent));
    }
  };
  switch (dtype) {
    case DType::kBFloat16:
      fill(matrix.as<uint16_t>(), float_to_bf16);
      break;
    case DType::kFloat16:
      fill(matrix.as<uint16_t>(), float_to_fp16);
      break;
    default:
      fill(matrix.as<float>(), [](float value) { return value; });
  }
  return matrix;
}

}  // namespace weft::test
