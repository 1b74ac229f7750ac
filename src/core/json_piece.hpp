// SPDX-License-Identifier: Apache-2.0
// Text of a JSON value for a message, of bounded length. Only flat values are printed, as printing
// follows the nesting, and a file from anywhere can nest deeper than the stack is.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <string>

namespace weft {

template <class Json>
[[nodiscard]] std::string json_piece(const Json& value) {
  constexpr size_t kMostChars = 40;
  if (value.is_structured()) {
    return fmt::format("{} of {}", value.is_array() ? "a list" : "an object", value.size());
  }
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= kMostChars ? text : text.substr(0, kMostChars - 3) + "...";
}

}  // namespace weft
