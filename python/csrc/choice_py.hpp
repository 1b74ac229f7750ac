// SPDX-License-Identifier: Apache-2.0
// Python says by a name what C++ says by an enumerator.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/error.hpp"

namespace weft::py {

template <class Choice>
using Names = std::vector<std::pair<std::string_view, Choice>>;

// `what`: the argument's name. Throws Error (kInvalidArgument) listing the names.
template <class Choice>
Choice choose(const char* what, std::string_view name, const Names<Choice>& names) {
  std::string known;
  for (const auto& [one, choice] : names) {
    if (one == name) {
      return choice;
    }
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string(what) + " = '" + std::string(name) + "' is unknown (one of: " + known + ")",
      -1,
      ""
  );
}

}  // namespace weft::py
