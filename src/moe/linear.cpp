// SPDX-License-Identifier: Apache-2.0
#include "moe/linear.hpp"

#include "moe/blas.hpp"

namespace weft::moe {
namespace {

int size(int64_t n) {
  return static_cast<int>(n);
}

}  // namespace

void linear_forward(ConstRows x, const float* w, Rows y) {
  if (x.rows == 0) {
    return;
  }
  const int in = size(x.cols);
  const int out = size(y.cols);
  blas().sgemm(
      CblasRowMajor,
      CblasNoTrans,
      CblasTrans,
      size(x.rows),
      out,
      in,
      1.0F,
      x.data,
      in,
      w,
      in,
      0.0F,
      y.data,
      out
  );
}

void linear_backward_input(ConstRows grad_y, const float* w, Rows grad_x) {
  if (grad_y.rows == 0) {
    return;
  }
  const int in = size(grad_x.cols);
  const int out = size(grad_y.cols);
  blas().sgemm(
      CblasRowMajor,
      CblasNoTrans,
      CblasNoTrans,
      size(grad_y.rows),
      in,
      out,
      1.0F,
      grad_y.data,
      out,
      w,
      in,
      0.0F,
      grad_x.data,
      in
  );
}

void linear_backward_weight(ConstRows grad_y, ConstRows x, float* grad_w) {
  if (grad_y.rows == 0) {
    return;
  }
  const int in = size(x.cols);
  const int out = size(grad_y.cols);
  blas().sgemm(
      CblasRowMajor,
      CblasTrans,
      CblasNoTrans,
      out,
      in,
      size(x.rows),
      1.0F,
      grad_y.data,
      out,
      x.data,
      in,
      1.0F,
      grad_w,
      in
  );
}

void linear_forward(ConstRows x, const Parameter& w, Rows y, const Shards& shards) {
  for (const Range& shard : shards) {
    linear_forward(slice(x, shard), w.value.data(), slice(y, shard));
  }
}

void linear_backward(
    ConstRows grad_y, ConstRows x, const Parameter& w, Rows grad_x, const Shards& shards
) {
  for (size_t i = 0; i < shards.size(); ++i) {
    const ConstRows gy = slice(grad_y, shards[i]);
    linear_backward_weight(gy, slice(x, shards[i]), w.grad_of(i).data());
    linear_backward_input(gy, w.value.data(), slice(grad_x, shards[i]));
  }
}

}  // namespace weft::moe
