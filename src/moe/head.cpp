// SPDX-License-Identifier: Apache-2.0
#include "moe/head.hpp"

#include <algorithm>

#include "moe/embedding.hpp"
#include "moe/linear.hpp"

namespace weft::moe {

void Head::forward(const Matrix& x, Matrix& logits, const Shards& shards) {
  norm_.forward(x, normed_);
  logits.resize(x.rows(), kNumBytes);
  linear_forward(normed_, weight_, rows_of(logits), shards);
}

void Head::backward(const Matrix& grad_logits, Matrix& grad_x, const Shards& shards) {
  grad_normed_.resize(normed_.rows(), normed_.cols());
  linear_backward(grad_logits, normed_, weight_, rows_of(grad_normed_), shards);
  grad_x.resize(normed_.rows(), normed_.cols());
  std::ranges::fill(grad_x.span(), 0.0F);
  norm_.backward(grad_normed_, grad_x, shards);
}

}  // namespace weft::moe
