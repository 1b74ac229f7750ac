// SPDX-License-Identifier: Apache-2.0
// What a model has apart from its experts: embedding, norm, output head and loss. model.hpp puts
// them around its blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "train/layers/matrix.hpp"

namespace weft::moe {

inline constexpr int kNumBytes = 256;  // values of a byte

// A token is the sum over its window of a vector for each (position, byte) pair: the product with a
// wide one-hot row, without the zeros.
class Embedding {
 public:
  // table: [window, kNumBytes, hidden].
  Embedding(Parameter table, int window, int hidden)
      : table_(table), window_(window), hidden_(hidden) {}

  // windows: [num_tokens, window].
  void forward(std::span<const std::byte> windows, Matrix& x) const;
  void backward(std::span<const std::byte> windows, const Matrix& grad_x, const Shards& shards);

 private:
  // Where the vector of a byte at a position begins in the table.
  [[nodiscard]] int64_t vector_at(int64_t position, std::byte value) const {
    return (position * kNumBytes + std::to_integer<int64_t>(value)) * hidden_;
  }

  Parameter table_;
  int64_t window_;
  int64_t hidden_;
};

// y = x / sqrt(mean(x^2) + epsilon) * gain, row by row.
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

// From the last block to a logit for each byte: norm, then a product.
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

// Cross-entropy of the next byte, in nats: the sum over these tokens times `scale` and turns logits
// [num_tokens, kNumBytes] into its gradient.
double cross_entropy(Rows logits, std::span<const std::byte> targets, float scale);

void softmax_in_place(std::span<float> row);
// Turns the gradient for the probabilities into the gradient for the logits.
void softmax_backward_in_place(std::span<const float> probs, std::span<float> grad);

}  // namespace weft::moe
