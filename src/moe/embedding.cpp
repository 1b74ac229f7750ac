// SPDX-License-Identifier: Apache-2.0
#include "moe/embedding.hpp"

#include <algorithm>

namespace weft::moe {

void Embedding::forward(std::span<const std::byte> windows, Matrix& x) const {
  const int64_t num_tokens = static_cast<int64_t>(windows.size()) / window_;
  x.resize(num_tokens, hidden_);
  std::ranges::fill(x.span(), 0.0F);
  for (int64_t t = 0; t < num_tokens; ++t) {
    float* out = x.row(t);
    for (int64_t p = 0; p < window_; ++p) {
      const std::byte value = windows[static_cast<size_t>(t * window_ + p)];
      const float* vector = table_.value.data() + vector_at(p, value);
      for (int64_t h = 0; h < hidden_; ++h) {
        out[h] += vector[h];
      }
    }
  }
}

void Embedding::backward(
    std::span<const std::byte> windows, const Matrix& grad_x, const Shards& shards
) {
  for (size_t i = 0; i < shards.size(); ++i) {
    float* grad_table = table_.grad_of(i).data();
    // Index of the (token, position) pair.
    for (int64_t w = shards[i].begin * window_; w < shards[i].end * window_; ++w) {
      const float* grad = grad_x.row(w / window_);
      float* vector = grad_table + vector_at(w % window_, windows[static_cast<size_t>(w)]);
      for (int64_t h = 0; h < hidden_; ++h) {
        vector[h] += grad[h];
      }
    }
  }
}

}  // namespace weft::moe
