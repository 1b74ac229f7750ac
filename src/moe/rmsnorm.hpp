// SPDX-License-Identifier: Apache-2.0
// y = x / sqrt(mean(x^2) + epsilon) * gain, row by row.
#pragma once

#include <vector>

#include "moe/matrix.hpp"

namespace weft::moe {

class RmsNorm {
 public:
  explicit RmsNorm(Parameter gain) : gain_(gain) {}  // [hidden]

  // Keeps a copy of x for backward.
  void forward(const Matrix& x, Matrix& y);
  // grad_x += the gradient for x.
  void backward(const Matrix& grad_y, Matrix& grad_x, const Shards& shards);

 private:
  void backward_row(int64_t token, const float* gy, float* gx, float* grad_gain) const;

  Parameter gain_;
  Matrix x_;
  std::vector<float> inverse_rms_;  // [num_tokens]
};

}  // namespace weft::moe
