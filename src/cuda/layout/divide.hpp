// SPDX-License-Identifier: Apache-2.0
// Division in a kernel by a number that the host knows.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// Division by a number that is known only at run time, without a divide: exact for values and
// divisors below 2^16. Making a FastDivide takes a divide, so hosts make those that a kernel would
// need at its begin.
class FastDivide {
 public:
  FastDivide() = default;
  WEFT_HD constexpr explicit FastDivide(uint32_t divisor)
      : divisor_(divisor), factor_(uint64_t{UINT32_MAX / divisor} + 1) {}

  [[nodiscard]] WEFT_HD constexpr uint32_t divide(uint32_t value) const {
    return static_cast<uint32_t>(value * factor_ >> 32);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t remainder(uint32_t value, uint32_t quotient) const {
    return value - quotient * divisor_;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint64_t factor_ = uint64_t{1} << 32;
};

}  // namespace weft
