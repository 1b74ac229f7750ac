// SPDX-License-Identifier: Apache-2.0
// How the floating-point unit rounds, and whether it takes subnormal numbers for zero, are state of
// a thread, which callers may have set (torch.set_flush_denormal, libraries built with -ffast-math)
// and which new threads inherit.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace weft {

// While a StandardFloats lives, its thread rounds to nearest even, keeps subnormal numbers, and
// traps nothing, so that all threads compute the same bits. Then the old state is set again.
class StandardFloats {
 public:
  StandardFloats() : before_(read()) {
    if (!is_standard()) {
      write(kStandard);
    }
  }
  ~StandardFloats() {
    if (!is_standard()) {
      write(before_);
    }
  }
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
  // The instructions are barriers: no load or store of a number is moved across them.
#if defined(__x86_64__)
  using State = uint32_t;                      // MXCSR
  static constexpr State kStandard = 0x1f80;   // all exceptions masked
  static constexpr State kHasHappened = 0x3f;  // exceptions, which change nothing
  static State read() {
    State now = 0;
    asm volatile("stmxcsr %0" : "=m"(now) : : "memory");
    return now;
  }
  static void write(State state) {
    asm volatile("ldmxcsr %0" : : "m"(state) : "memory");
  }
  [[nodiscard]] bool is_standard() const {
    return (before_ & ~kHasHappened) == kStandard;
  }
#elif defined(__aarch64__)
  using State = uint64_t;  // FPCR
  static constexpr State kStandard = 0;
  static State read() {
    State now = 0;
    asm volatile("mrs %0, fpcr" : "=r"(now) : : "memory");
    return now;
  }
  static void write(State state) {
    asm volatile("msr fpcr, %0" : : "r"(state) : "memory");
  }
  [[nodiscard]] bool is_standard() const {
    return before_ == kStandard;
  }
#else
  using State = int;  // only the rounding is known
  static constexpr State kStandard = FE_TONEAREST;
  static State read() {
    return std::fegetround();
  }
  static void write(State state) {
    std::fesetround(state);
  }
  [[nodiscard]] bool is_standard() const {
    return before_ == kStandard;
  }
#endif

  State before_;
};

}  // namespace weft
