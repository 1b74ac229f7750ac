// SPDX-License-Identifier: Apache-2.0
// Routing for tests, benchmarks and `weft check`: the same on every platform for the same seed.
#pragma once

#include <cstdint>
#include <string_view>

#include "plan/build.hpp"

namespace weft {

enum class Popularity : uint8_t {
  kUniform,
  kZipf,       // the n-th most popular expert is drawn with weight 1 / n^zipf_exponent
  kOneExpert,  // every route names the same expert
};

[[nodiscard]] std::string_view popularity_name(Popularity popularity);

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

// One rank's routing. Without repeat_experts, topk must not exceed num_experts.
[[nodiscard]] RouteTable random_routing(const RandomRouting& spec, int rank = 0);

}  // namespace weft
