// SPDX-License-Identifier: Apache-2.0
#include "plan/crossings.hpp"

#include <limits>

namespace weft {
namespace {

constexpr int32_t kEnd = std::numeric_limits<int32_t>::max();

// Merges the token lists, `visit(token, pair, arrival)` for each arrival, by token, then pair.
template <class Visit>
void merge(std::span<const Arrivals* const> pairs, const Visit& visit) {
  std::vector<size_t> next(pairs.size());
  const auto token_of = [&](size_t p) {
    return pairs[p] != nullptr && next[p] < pairs[p]->token.size() ? pairs[p]->token[next[p]]
                                                                   : kEnd;
  };
  for (;;) {
    int32_t first = kEnd;
    for (size_t p = 0; p < pairs.size(); ++p) {
      first = std::min(first, token_of(p));
    }
    if (first == kEnd) {
      return;
    }
    for (size_t p = 0; p < pairs.size(); ++p) {
      if (token_of(p) == first) {
        visit(first, p, static_cast<int32_t>(next[p]++));
      }
    }
  }
}

}  // namespace

std::vector<int32_t> crossing_tokens(std::span<const Arrivals* const> pairs) {
  std::vector<int32_t> tokens;
  merge(pairs, [&](int32_t token, size_t /*pair*/, int32_t /*arrival*/) {
    if (tokens.empty() || tokens.back() != token) {
      tokens.push_back(token);
    }
  });
  return tokens;
}

Crossings find_crossings(std::span<const Arrivals* const> pairs) {
  Crossings found;
  found.num_members = pairs.size();
  found.crossing.resize(pairs.size());
  merge(pairs, [&](int32_t token, size_t pair, int32_t arrival) {
    if (found.token.empty() || found.token.back() != token) {
      found.token.push_back(token);
      found.arrival.resize(found.arrival.size() + pairs.size(), -1);
    }
    const size_t index = found.token.size() - 1;
    found.arrival[index * pairs.size() + pair] = arrival;
    found.crossing[pair].push_back(static_cast<int32_t>(index));
  });
  return found;
}

}  // namespace weft
