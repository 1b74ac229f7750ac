// SPDX-License-Identifier: Apache-2.0
// AdamW with decoupled weight decay over one flat vector.
#pragma once

#include <cstdint>
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
void adamw_update(
    const AdamStep& step,
    std::span<float> value,
    std::span<const float> grad,
    AdamMoments& moments,
    size_t begin,
    size_t end
);

}  // namespace weft::moe
