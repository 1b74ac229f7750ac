// SPDX-License-Identifier: Apache-2.0
// Tokens of one rank that cross to another domain, each once, whichever ranks there it goes to. The
// list follows from the arrivals of the pairs (source, member) of that domain, so the source and
// its carrier derive the same one.
#pragma once

#include <span>
#include <vector>

#include "plan/plan_data.hpp"

namespace weft {

// Tokens with an arrival in any of the pairs, ascending. An empty pair may be null.
[[nodiscard]] std::vector<int32_t> crossing_tokens(std::span<const Arrivals* const> pairs);

// The same list with the way from arrivals to it and back.
[[nodiscard]] Crossings find_crossings(std::span<const Arrivals* const> pairs);

}  // namespace weft
