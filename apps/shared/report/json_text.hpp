// SPDX-License-Identifier: Apache-2.0
// JSON as the program writes it.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace weft::program {

inline constexpr int kOneLine = -1;

// Bytes of paths and names that are no UTF-8 become the replacement character.
[[nodiscard]] inline std::string json_text(const nlohmann::ordered_json& json, int indent = 2) {
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace weft::program
