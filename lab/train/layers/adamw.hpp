// SPDX-License-Identifier: Apache-2.0
// AdamW with decoupled weight decay over one flat vector.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace weft::moe {

struct AdamStep {
  float learning_rate = 0;
  float beta1 = 0;
  float beta2 = 0;
  float epsilon = 0;
  float weight_decay = 0;
  float bias1 = 1;  // 1 - beta1^step, step from 1
  float bias2 = 1;  // 1 - beta2^step
};

struct AdamMoments {
  std::vector<float> mean;
  std::vector<float> square;
  explicit AdamMoments(size_t size) : mean(size), square(size) {}
};

// Updates elements [begin, end) of value from grad; all spans have the moments' length.
inline void adamw_update(
    const AdamStep& step,
    std::span<float> value,
    std::span<const float> grad,
    AdamMoments& moments,
    size_t begin,
    size_t end
) {
  const float decay = 1.0F - step.learning_rate * step.weight_decay;
  const float rate = step.learning_rate / step.bias1;
  const float root_bias2 = std::sqrt(step.bias2);
  const float epsilon = step.epsilon * root_bias2;
  float* mean = moments.mean.data();
  float* square = moments.square.data();
  for (size_t i = begin; i < end; ++i) {
    mean[i] = step.beta1 * mean[i] + (1.0F - step.beta1) * grad[i];
    square[i] = step.beta2 * square[i] + (1.0F - step.beta2) * grad[i] * grad[i];
    value[i] = value[i] * decay - rate * root_bias2 * mean[i] / (std::sqrt(square[i]) + epsilon);
  }
}

}  // namespace weft::moe
