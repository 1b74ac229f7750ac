// SPDX-License-Identifier: Apache-2.0
// Ranks in messages: "rank 3", "ranks 1, 4 and 5".
#pragma once

#include <fmt/format.h>

#include <span>
#include <string>

namespace weft {

[[nodiscard]] inline std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool is_last = i + 1 == ranks.size();
    text += i == 0 ? "" : is_last ? " and " : ", ";
    text += fmt::format("{}", ranks[i]);
  }
  return text;
}

}  // namespace weft
