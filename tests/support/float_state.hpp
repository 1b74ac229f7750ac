// SPDX-License-Identifier: Apache-2.0
// A thread whose floating-point state is not what programs mostly have, and how that shows.
#pragma once

#include <array>
#include <bit>
#include <cfenv>
#include <cstdint>

namespace weft::test {

// While it lives, this thread rounds up and, where the processor can, takes subnormal numbers for
// zero.
class OddFloats {
 public:
  OddFloats() {
    std::fegetenv(&before_);
    std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t state = 0;
    asm volatile("mrs %0, fpcr" : "=r"(state) : : "memory");
    asm volatile("msr fpcr, %0" : : "r"(state | 1U << 24) : "memory");
#endif
  }
  ~OddFloats() {
    std::fesetenv(&before_);
  }
  OddFloats(const OddFloats&) = delete;
  OddFloats& operator=(const OddFloats&) = delete;

 private:
  std::fenv_t before_{};
};

using Products = std::array<uint32_t, 2>;
inline constexpr Products kStandardProducts = {0x00400000U, 0x3d23d70aU};

// Half of the least normal number, and 0.04, by operations that no compiler does beforehand.
[[nodiscard]] inline Products product_bits() {
  volatile float least = 0x1p-126F;
  volatile float half = 0.5F;
  volatile float one = 1;
  volatile float many = 25;
  const volatile float subnormal = least * half;
  const volatile float quotient = one / many;
  return {std::bit_cast<uint32_t>(float{subnormal}), std::bit_cast<uint32_t>(float{quotient})};
}

}  // namespace weft::test
