// SPDX-License-Identifier: Apache-2.0
#include "moe/loss.hpp"

#include <algorithm>
#include <cmath>

#include "moe/softmax.hpp"

namespace weft::moe {

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
