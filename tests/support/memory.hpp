// SPDX-License-Identifier: Apache-2.0
// A matrix with its memory, filled with a canary and fenced by guard rows, so that a byte written
// where nobody should write is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/random_routing.hpp"
#include "weft/tensor.hpp"

namespace weft::test {

inline constexpr std::byte kCanary{0xa5};
// Before and behind, each; rows of whole words then begin at a multiple of 16 bytes.
inline constexpr int64_t kGuardRows = 4;

class Matrix {
 public:
  Matrix() = default;  // stands for "not given"
  Matrix(DType dtype, int64_t rows, int64_t cols)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        bytes_(static_cast<size_t>((rows + 2 * kGuardRows) * cols * dtype_bytes(dtype)), kCanary) {}

  [[nodiscard]] Tensor view() { return {const_cast<std::byte*>(begin()), dtype_, rows_, cols_}; }
  [[nodiscard]] ConstTensor view() const { return {begin(), dtype_, rows_, cols_}; }
  // Guard rows included.
  [[nodiscard]] Tensor with_guards() {
    return {bytes_.data(), dtype_, cols_ == 0 ? 0 : rows_ + 2 * kGuardRows, cols_};
  }
  template <class T>
  [[nodiscard]] T* as() {
    return reinterpret_cast<T*>(view().data);
  }
  template <class T>
  [[nodiscard]] const T* as() const {
    return reinterpret_cast<const T*>(begin());
  }
  [[nodiscard]] size_t num_elements() const { return static_cast<size_t>(rows_ * cols_); }
  [[nodiscard]] bool has_guards_untouched() const;

 private:
  [[nodiscard]] const std::byte* begin() const {
    return cols_ == 0 ? nullptr : bytes_.data() + kGuardRows * cols_ * dtype_bytes(dtype_);
  }

  DType dtype_ = DType::kFloat32;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<std::byte> bytes_;
};

void fill_canary(const Tensor& tensor);
[[nodiscard]] bool is_canary(const Tensor& tensor);

// Any bits at all, NaN included: for what is only copied.
[[nodiscard]] Matrix random_bits(DType dtype, int64_t rows, int64_t cols, RandomSource& random);
// Finite values of such different size that a sum in another order has other bits.
[[nodiscard]] Matrix random_values(DType dtype, int64_t rows, int64_t cols, RandomSource& random);

}  // namespace weft::test
