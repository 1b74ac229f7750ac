// SPDX-License-Identifier: Apache-2.0
#include "overlap/weight_gradients.hpp"

#include <utility>

namespace weft::overlap {

void WeightGradientQueue::run(const LaneContext& context) {
  while (!pending_.empty()) {
    const Work gradient = std::move(pending_.front());
    pending_.pop_front();
    gradient(context);
  }
  for (const Work& hook : hooks_) {
    hook(context);
  }
}

}  // namespace weft::overlap
