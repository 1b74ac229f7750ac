// SPDX-License-Identifier: Apache-2.0
#include "moe/head.hpp"

#include <algorithm>

#include "moe/embedding.hpp"
#include "moe/linear.hpp"

namespace weft::moe {

void Head::forward(const Matrix& x, Matrix& logits) {
  norm_.forward(x, normed_);
  logits.resize(x.rows(), kNumBytes);
  linear_forward(normed_, weight_.value.data(), rows_of(logits));
}

void Head::backward(const Matrix& grad_logits, Matrix& grad_x) {
  linear_backward_weight(grad_logits, normed_, weight_.grad.data());
  grad_normed_.resize(normed_.rows(), normed_.cols());
  linear_backward_input(grad_logits, weight_.value.data(), rows_of(grad_normed_));
  grad_x.resize(normed_.rows(), normed_.cols());
  std::ranges::fill(grad_x.span(), 0.0F);
  norm_.backward(grad_normed_, grad_x);
}

}  // namespace weft::moe
