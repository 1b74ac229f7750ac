// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same on every platform (std distributions are not).
#pragma once

#include <cstdint>

namespace weft {

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : state_(seed) {}

  // Splitmix64 (Steele, Lea, Flood 2014): a counter through a mixing function.
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15U;
    uint64_t z = state_;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return z ^ z >> 31;
  }

  // In [0, bound), bound from 1 to 2^32; the bias is below 2^-32.
  uint64_t below(uint64_t bound) { return (next() >> 32) * bound >> 32; }

  // In [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low) + 1));
  }

  // In [0, 1), a multiple of 2^-24.
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24F; }

 private:
  uint64_t state_;
};

}  // namespace weft
