// SPDX-License-Identifier: Apache-2.0
#include "plan/crossings.hpp"

#include <algorithm>

namespace weft {
namespace {

// By token: whether any pair has it. As long as the largest token says.
std::vector<int32_t> mark_tokens(std::span<const Arrivals* const> pairs) {
  std::vector<int32_t> is_there;
  for (const Arrivals* pair : pairs) {
    if (pair != nullptr && !pair->token.empty()) {
      is_there.resize(std::max(is_there.size(), static_cast<size_t>(pair->token.back()) + 1));
      for (const int32_t token : pair->token) {
        is_there[static_cast<size_t>(token)] = 1;
      }
    }
  }
  return is_there;
}

// Of the tokens that are there, ascending; each one's number takes its mark's place. Without a
// branch: which tokens are there cannot be predicted.
std::vector<int32_t> number_tokens(std::span<int32_t> marks) {
  std::vector<int32_t> tokens(marks.size());
  size_t next = 0;
  for (size_t token = 0; token < marks.size(); ++token) {
    const auto is_there = static_cast<size_t>(marks[token]);
    marks[token] = static_cast<int32_t>(next);
    tokens[next] = static_cast<int32_t>(token);
    next += is_there;
  }
  tokens.resize(next);
  return tokens;
}

}  // namespace

std::vector<int32_t> crossing_tokens(std::span<const Arrivals* const> pairs) {
  std::vector<int32_t> marks = mark_tokens(pairs);
  return number_tokens(marks);
}

Crossings find_crossings(std::span<const Arrivals* const> pairs) {
  const size_t members = pairs.size();
  Crossings found;
  found.num_members = members;
  found.crossing.resize(members);
  std::vector<int32_t> number = mark_tokens(pairs);
  found.token = number_tokens(number);
  found.arrival.assign(found.token.size() * members, -1);
  for (size_t member = 0; member < members; ++member) {
    if (pairs[member] == nullptr) {
      continue;
    }
    const std::vector<int32_t>& tokens = pairs[member]->token;
    std::vector<int32_t>& crossing = found.crossing[member];
    crossing.resize(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      crossing[i] = number[static_cast<size_t>(tokens[i])];
      found.arrival[static_cast<size_t>(crossing[i]) * members + member] = static_cast<int32_t>(i);
    }
  }
  return found;
}

}  // namespace weft
