// SPDX-License-Identifier: Apache-2.0
#include "moe/adamw.hpp"

#include <cmath>

namespace weft::moe {

void adamw_update(
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
