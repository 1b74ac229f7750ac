// SPDX-License-Identifier: Apache-2.0
// Aligned text tables and the forms in which numbers are shown.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::program {

// Columns whose cells are all numbers (or empty, or "-") are right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : header_(std::move(header)) {}

  // A row has as many cells as the header has columns.
  void add_row(std::vector<std::string> cells);
  [[nodiscard]] bool is_empty() const { return rows_.empty(); }
  [[nodiscard]] const std::vector<std::string>& header() const { return header_; }
  [[nodiscard]] const std::vector<std::vector<std::string>>& rows() const { return rows_; }
  [[nodiscard]] bool is_number_column(size_t column) const;
  // Header, rule and rows, each line ended; lines carry no trailing blanks.
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::string> header_;
  std::vector<std::vector<std::string>> rows_;
};

// "rank|tokens" names two columns.
[[nodiscard]] std::vector<std::string> columns(std::string_view names);

[[nodiscard]] std::string count_text(int64_t value);     // 1,234,567
[[nodiscard]] std::string bytes_text(double bytes);      // 1.5 GB (decimal)
[[nodiscard]] std::string seconds_text(double seconds);  // 12.3 us, 4.56 ms, 7.89 s

[[nodiscard]] inline std::string text_or(const std::string& text, const char* otherwise) {
  return text.empty() ? otherwise : text;
}

// Numbers as characters of growing darkness, for pictures that survive any pipe.
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
