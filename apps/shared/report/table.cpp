// SPDX-License-Identifier: Apache-2.0
#include "report/table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.hpp"

namespace weft::program {
namespace {

// Characters as a terminal shows them: UTF-8 continuation bytes take no column.
size_t width_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U;
  }));
}

bool is_number(const std::string& cell) {
  if (cell.empty() || cell == "-") {
    return true;
  }
  const size_t first = cell[0] == '-' || cell[0] == '+' ? 1 : 0;
  return first < cell.size() && cell[first] >= '0' && cell[first] <= '9';
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
  WEFT_ASSERT(cells.size() == header_.size());
  rows_.push_back(std::move(cells));
}

bool Table::is_number_column(size_t column) const {
  return std::all_of(rows_.begin(), rows_.end(), [&](const auto& row) {
    return is_number(row[column]);
  });
}

std::string Table::text() const {
  std::vector<std::string> lines(rows_.size() + 1);
  for (size_t column = 0; column < header_.size(); ++column) {
    std::vector<std::string_view> cells = {header_[column]};
    for (const auto& row : rows_) {
      cells.emplace_back(row[column]);
    }
    const size_t width = width_of(*std::ranges::max_element(cells, {}, width_of));
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string blanks(width - width_of(cells[i]), ' ');
      lines[i] += column == 0 ? "" : "  ";
      lines[i].append(is_number_column(column) ? blanks : "").append(cells[i]);
      lines[i] += is_number_column(column) ? "" : blanks;
    }
  }
  for (std::string& line : lines) {
    line.erase(line.find_last_not_of(' ') + 1);
  }
  const size_t widest = width_of(*std::ranges::max_element(lines, {}, width_of));
  lines.insert(lines.begin() + 1, std::string(widest, '-'));
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

std::vector<std::string> columns(std::string_view names) {
  std::vector<std::string> out(1);
  for (const char c : names) {
    c == '|' ? static_cast<void>(out.emplace_back()) : out.back().push_back(c);
  }
  return out;
}

std::string count_text(int64_t value) {
  std::string digits = fmt::format("{}", value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t i = digits.size(); i > first + 3; i -= 3) {
    digits.insert(i - 3, 1, ',');
  }
  return digits;
}

std::string bytes_text(double bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 999.5 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  const int decimals = unit == 0 || std::abs(bytes) >= 99.95 ? 0 : std::abs(bytes) >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f} {}", bytes, decimals, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) {
    return fmt::format("{:.1f} us", seconds * 1e6);
  }
  if (seconds < 1) {
    return fmt::format("{:.2f} ms", seconds * 1e3);
  }
  return seconds < 600 ? fmt::format("{:.2f} s", seconds) : fmt::format("{:.1f} min", seconds / 60);
}

}  // namespace weft::program
