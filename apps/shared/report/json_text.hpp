// SPDX-License-Identifier: Apache-2.0
// JSON as the program writes it.
#pragma once

#include <nlohmann/json.hpp>

#include <cmath>
#include <string>

#include "core/atomic_file.hpp"

namespace weft::program {

inline constexpr int kOneLine = -1;

// Bytes of paths and names that are no UTF-8 become the replacement character.
[[nodiscard]] inline std::string json_text(const nlohmann::ordered_json& json, int indent = 2) {
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

// Digits beyond these decimals are noise.
[[nodiscard]] inline double rounded(double value, int decimals = 3) {
  const double scale = std::pow(10, decimals);
  return std::round(value * scale) / scale;
}

// Throws Error (kFile).
inline void save_json(const std::string& path, const nlohmann::ordered_json& json) {
  write_file_atomically(path, json_text(json) + "\n");
}

}  // namespace weft::program
