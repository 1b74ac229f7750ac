// SPDX-License-Identifier: Apache-2.0
// fp32 matrices, row after row, and their way to and from the tensors that travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train/shards.hpp"
#include "weft/tensor.hpp"

namespace weft::moe {

class Matrix {
 public:
  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) { resize(rows, cols); }

  // Contents are undefined afterwards; memory is kept when it shrinks.
  void resize(int64_t rows, int64_t cols) {
    rows_ = rows;
    cols_ = cols;
    values_.resize(static_cast<size_t>(rows * cols));
  }

  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t cols() const { return cols_; }
  [[nodiscard]] float* data() { return values_.data(); }
  [[nodiscard]] const float* data() const { return values_.data(); }
  [[nodiscard]] float* row(int64_t i) { return values_.data() + i * cols_; }
  [[nodiscard]] const float* row(int64_t i) const { return values_.data() + i * cols_; }
  [[nodiscard]] std::span<float> span() { return values_; }
  [[nodiscard]] std::span<const float> span() const { return values_; }

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<float> values_;
};

// A learned matrix or vector and the gradient that backward adds to, one for each shard of the
// rank's tokens where tokens are the rank's own.
struct Parameter {
  std::span<float> value;
  std::span<float> grad;   // of the first shard
  size_t grad_stride = 0;  // from one shard's to the next

  [[nodiscard]] std::span<float> grad_of(size_t shard) const {
    return {grad.data() + shard * grad_stride, grad.size()};
  }
};

// Some rows that someone else owns: one expert's block, or a tensor that arrived.
struct Rows {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
};
struct ConstRows {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  ConstRows() = default;
  ConstRows(const float* d, int64_t r, int64_t c) : data(d), rows(r), cols(c) {}
  ConstRows(const Rows& other) : ConstRows(other.data, other.rows, other.cols) {}
  ConstRows(const Matrix& m) : ConstRows(m.data(), m.rows(), m.cols()) {}
};

[[nodiscard]] inline Rows rows_of(Matrix& m) {
  return {m.data(), m.rows(), m.cols()};
}
[[nodiscard]] inline Rows slice(Rows all, Range rows) {
  return {all.data + rows.begin * all.cols, rows.size(), all.cols};
}
[[nodiscard]] inline ConstRows slice(ConstRows all, Range rows) {
  return {all.data + rows.begin * all.cols, rows.size(), all.cols};
}

// The fp32 or bf16 tensor as fp32 rows: itself, or converted into `scratch`.
[[nodiscard]] ConstRows as_rows(const ConstTensor& tensor, Matrix& scratch);
// The rows as a tensor of dtype fp32 or bf16: themselves, or converted into `scratch`.
[[nodiscard]] ConstTensor as_tensor(ConstRows rows, DType dtype, std::vector<uint16_t>& scratch);
// A tensor of dtype fp32 or bf16 to be filled: the matrix itself, or `scratch`; and, once filled,
// its values in the matrix.
[[nodiscard]] Tensor tensor_for(Matrix& m, DType dtype, std::vector<uint16_t>& scratch);
void take_values(const Tensor& filled, Matrix& m);

}  // namespace weft::moe
