// SPDX-License-Identifier: Apache-2.0
// Many small random exchanges, every bit checked.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace weft::test {

struct SoakResult {
  int64_t num_calls = 0;  // plans, dispatches and combines, each counted once for all its ranks
  std::string failure;    // empty if all was well; names the seed
};

// Rounds of random exchanges from `seed` on, until so many calls have passed or one failed.
// `progress` hears of the number after each round.
[[nodiscard]] SoakResult soak(
    const std::string& transport,
    uint64_t seed,
    int64_t num_calls,
    const std::function<void(int64_t)>& progress = {}
);

}  // namespace weft::test
