// SPDX-License-Identifier: Apache-2.0
// Numbers as characters of growing darkness, for pictures that survive any pipe.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <string_view>

namespace weft::program {

inline constexpr std::string_view kShades = " .:-=+*#%@";

// One character per value; `high` is the darkest.
[[nodiscard]] inline std::string shaded(std::span<const double> values, double high) {
  const auto last = static_cast<double>(kShades.size() - 1);
  std::string out;
  for (const double value : values) {
    const double part = high > 0 ? std::clamp(value / high, 0.0, 1.0) : 0;
    out += kShades[static_cast<size_t>(std::lround(part * last))];
  }
  return out;
}

}  // namespace weft::program
