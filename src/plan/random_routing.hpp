// SPDX-License-Identifier: Apache-2.0
// Random numbers and routing for tests, benchmarks and `weft check`: the same on every platform for
// the same seed.
#pragma once

#include <cstdint>
#include <string_view>

#include "plan/build.hpp"

namespace weft {

// Same on every platform, unlike the distributions of std.
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

  // Draws from [0, bound), bound from 1 to 2^32; the bias is below 2^-32.
  uint64_t below(uint64_t bound) { return (next() >> 32) * bound >> 32; }

  // Draws from [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low) + 1));
  }

  // Draws from [0, 1), a multiple of 2^-24.
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24F; }

 private:
  uint64_t state_;
};

enum class Popularity : uint8_t {
  kUniform,
  kZipf,       // the n-th most popular expert is drawn with weight 1 / n^zipf_exponent
  kOneExpert,  // every route names the same expert
};

struct RandomRouting {
  int64_t num_tokens = 0;
  int num_experts = 0;
  int topk = 0;
  Popularity popularity = Popularity::kUniform;
  double zipf_exponent = 1.0;   // at least 0; rounded to sixteenths
  double hole_fraction = 0.0;   // of routes that are -1
  bool repeat_experts = false;  // the same expert may come twice in a token
  bool with_weights = true;     // in (0, 1]
  uint64_t seed = 0;            // popular experts are the same on all ranks of a seed
};

// Makes a rank's routing. Without repeat_experts, topk must not exceed num_experts.
[[nodiscard]] RouteTable random_routing(const RandomRouting& spec, int rank = 0);

}  // namespace weft
