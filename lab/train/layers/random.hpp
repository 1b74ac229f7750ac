// SPDX-License-Identifier: Apache-2.0
// Random numbers as a function of what they are for, so that no rank needs to know what the others
// drew.
#pragma once

#include <cstdint>

namespace weft::moe {

inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15U;  // 2^64 over the golden ratio

// A bijection that scatters every bit (the finaliser of SplitMix64).
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

// The draw numbered `counter` of the stream `stream` under `seed`.
constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
  return mix_bits(mix_bits(mix_bits(seed + kGolden) + stream * kGolden) + counter * kGolden);
}

// Uniform in [-1, 1).
constexpr float random_symmetric(uint64_t seed, uint64_t stream, uint64_t counter) {
  const auto draw = static_cast<int32_t>(random_bits(seed, stream, counter) >> 40);
  return static_cast<float>(draw) * 0x1p-23F - 1.0F;
}

}  // namespace weft::moe
