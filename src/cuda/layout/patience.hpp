// SPDX-License-Identifier: Apache-2.0
// How long a wait on a GPU has taken, by a clock that may jump: it goes on while a virtual machine
// is paused with all its ranks, and may be set back. Every wait of the kernels has its deadline by
// it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// Adds up time between looks at the lower half of a clock's nanoseconds. Each look counts for at
// most `most`, so that a jump, back or forth, costs one look.
class Patience {
 public:
  // Returns the most nanoseconds that a look counts for where waits have `deadline`: at most a
  // second, and so little that no wait is over before the third look.
  static constexpr uint32_t most_of(uint64_t deadline) {
    return static_cast<uint32_t>(std::min<uint64_t>(deadline / 2, 1'000'000'000));
  }

  WEFT_HD explicit Patience(uint32_t now) : last_(now) {}

  // Returns the nanoseconds waited until this look.
  WEFT_HD uint64_t look(uint32_t now, uint32_t most) {
    const uint32_t step = now - last_;  // a clock that was set back seems to have gone far
    last_ = now;
    waited_ += step < most ? step : most;
    return waited_;
  }

 private:
  uint32_t last_;
  uint64_t waited_ = 0;
};

}  // namespace weft
