// SPDX-License-Identifier: Apache-2.0
// AdamW with decoupled weight decay over one flat vector.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "core/hd.hpp"

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

// Rates of one step, the same for every element.
struct AdamRates {
  float beta1;
  float beta2;
  float decay;
  float rate;
  float epsilon;

  explicit AdamRates(const AdamStep& step)
      : beta1(step.beta1),
        beta2(step.beta2),
        decay(1.0F - step.learning_rate * step.weight_decay),
        rate(step.learning_rate / step.bias1 * std::sqrt(step.bias2)),
        epsilon(step.epsilon * std::sqrt(step.bias2)) {}
};

WEFT_HD inline void adamw_element(
    const AdamRates& rates, float& value, float grad, float& mean, float& square
) {
  mean = rates.beta1 * mean + (1.0F - rates.beta1) * grad;
  square = rates.beta2 * square + (1.0F - rates.beta2) * grad * grad;
  value = value * rates.decay - rates.rate * mean / (std::sqrt(square) + rates.epsilon);
}

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
  const AdamRates rates(step);
  float* mean = moments.mean.data();
  float* square = moments.square.data();
  for (size_t i = begin; i < end; ++i) {
    adamw_element(rates, value[i], grad[i], mean[i], square[i]);
  }
}

}  // namespace weft::moe
