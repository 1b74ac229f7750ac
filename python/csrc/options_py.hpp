// SPDX-License-Identifier: Apache-2.0
// Options of an exchange and of a call from Python: ExchangeConfig and Options, with the names of
// weft.Exchange's arguments and their values.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "weft/exchange.hpp"

namespace weft::py {

template <class Choice>
using Names = std::vector<std::pair<std::string_view, Choice>>;

// `what`: the argument's name. Throws Error (kInvalidArgument) listing the names.
template <class Choice>
Choice choose(const char* what, std::string_view name, const Names<Choice>& names) {
  for (const auto& [one, choice] : names) {
    if (one == name) {
      return choice;
    }
  }
  std::string known;
  for (const auto& [one, choice] : names) {
    known += (known.empty() ? "" : ", ") + std::string(one);
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string(what) + " = '" + std::string(name) + "' is unknown (one of: " + known + ")",
      -1,
      ""
  );
}

void bind_config(nb::module_& m);
void bind_options(nb::module_& m);

// Throws Error (kInvalidArgument) listing the names that there are.
[[nodiscard]] Wire wire_by_name(std::string_view name);

}  // namespace weft::py
