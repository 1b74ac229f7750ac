// SPDX-License-Identifier: Apache-2.0
// From the last block to a logit for each byte: norm, then a product.
#pragma once

#include "moe/matrix.hpp"
#include "moe/rmsnorm.hpp"

namespace weft::moe {

class Head {
 public:
  // gain: [hidden]; weight: [kNumBytes, hidden].
  Head(Parameter gain, Parameter weight) : norm_(gain), weight_(weight) {}

  void forward(const Matrix& x, Matrix& logits, const Shards& shards);
  // Overwrites grad_x.
  void backward(const Matrix& grad_logits, Matrix& grad_x, const Shards& shards);

 private:
  RmsNorm norm_;
  Parameter weight_;
  Matrix normed_;
  Matrix grad_normed_;
};

}  // namespace weft::moe
