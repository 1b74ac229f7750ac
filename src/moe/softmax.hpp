// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

namespace weft::moe {

inline void softmax_in_place(std::span<float> row) {
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

// Turns the gradient for the probabilities into the gradient for the logits.
inline void softmax_backward_in_place(std::span<const float> probs, std::span<float> grad) {
  float mean = 0.0F;
  for (size_t i = 0; i < probs.size(); ++i) {
    mean += probs[i] * grad[i];
  }
  for (size_t i = 0; i < probs.size(); ++i) {
    grad[i] = probs[i] * (grad[i] - mean);
  }
}

}  // namespace weft::moe
