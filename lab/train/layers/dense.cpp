// SPDX-License-Identifier: Apache-2.0
#include "train/layers/dense.hpp"

#include <algorithm>
#include <cmath>

#include "train/layers/linear.hpp"

namespace weft::moe {
namespace {

constexpr float kEpsilon = 1e-6F;

}  // namespace

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

void RmsNorm::forward(const Matrix& x, Matrix& y) {
  const int64_t hidden = x.cols();
  x_ = x;
  y.resize(x.rows(), hidden);
  inverse_rms_.resize(static_cast<size_t>(x.rows()));
  const float* gain = gain_.value.data();
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float* in = x.row(t);
    float* out = y.row(t);
    float sum = 0.0F;
    for (int64_t h = 0; h < hidden; ++h) {
      sum += in[h] * in[h];
    }
    const float scale = 1.0F / std::sqrt(sum / static_cast<float>(hidden) + kEpsilon);
    inverse_rms_[static_cast<size_t>(t)] = scale;
    for (int64_t h = 0; h < hidden; ++h) {
      out[h] = in[h] * scale * gain[h];
    }
  }
}

void RmsNorm::backward(const Matrix& grad_y, Matrix& grad_x, const Shards& shards) {
  for (size_t i = 0; i < shards.size(); ++i) {
    for (int64_t t = shards[i].begin; t < shards[i].end; ++t) {
      backward_row(t, grad_y.row(t), grad_x.row(t), gain_.grad_of(i).data());
    }
  }
}

void RmsNorm::backward_row(int64_t token, const float* gy, float* gx, float* grad_gain) const {
  const int64_t hidden = x_.cols();
  const float* gain = gain_.value.data();
  const float* in = x_.row(token);
  const float scale = inverse_rms_[static_cast<size_t>(token)];
  float dot = 0.0F;
  for (int64_t h = 0; h < hidden; ++h) {
    dot += gy[h] * gain[h] * in[h];
    grad_gain[h] += gy[h] * in[h] * scale;
  }
  // The scale depends on every element of the row.
  const float pull = dot * scale * scale / static_cast<float>(hidden);
  for (int64_t h = 0; h < hidden; ++h) {
    gx[h] += scale * (gy[h] * gain[h] - in[h] * pull);
  }
}

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

void softmax_in_place(std::span<float> row) {
  const float largest = *std::ranges::max_element(row);
  float sum = 0.0F;
  for (float& value : row) {
    value = std::exp(value - largest);
    sum += value;
  }
  for (float& value : row) {
    value /= sum;
  }
}

void softmax_backward_in_place(std::span<const float> probs, std::span<float> grad) {
  float mean = 0.0F;
  for (size_t i = 0; i < probs.size(); ++i) {
    mean += probs[i] * grad[i];
  }
  for (size_t i = 0; i < probs.size(); ++i) {
    grad[i] = probs[i] * (grad[i] - mean);
  }
}

double cross_entropy(Rows logits, std::span<const std::byte> targets, float scale) {
  double sum = 0;
  for (int64_t t = 0; t < logits.rows; ++t) {
    const std::span row(logits.data + t * logits.cols, static_cast<size_t>(logits.cols));
    const auto target = std::to_integer<size_t>(targets[static_cast<size_t>(t)]);
    float& largest = *std::ranges::max_element(row);
    const float margin = largest - row[target];
    softmax_in_place(row);
    // By way of the largest, whose logarithm is always finite.
    sum += static_cast<double>(margin) - std::log(static_cast<double>(largest));
    row[target] -= 1.0F;
    for (float& value : row) {
      value *= scale;
    }
  }
  return sum * static_cast<double>(scale);
}

}  // namespace weft::moe
