// SPDX-License-Identifier: Apache-2.0
#include "report/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.hpp"

namespace weft::program {
namespace {

// Characters as a terminal shows them: UTF-8 continuation bytes take no column.
size_t width_of(const std::string& text) {
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

std::string Table::line(const std::vector<std::string>& cells) const {
  std::string out;
  for (size_t i = 0; i < cells.size(); ++i) {
    size_t width = width_of(header_[i]);
    for (const auto& row : rows_) {
      width = std::max(width, width_of(row[i]));
    }
    const size_t blanks = width - width_of(cells[i]);
    const bool is_right = is_number_column(i);
    out.append(i == 0 ? 0 : 2, ' ').append(is_right ? blanks : 0, ' ');
    out.append(cells[i]).append(is_right ? 0 : blanks, ' ');
  }
  out.erase(out.find_last_not_of(' ') + 1);
  out.push_back('\n');
  return out;
}

std::string Table::text() const {
  std::string out = line(header_);
  size_t widest = width_of(out) - 1;
  std::string body;
  for (const auto& row : rows_) {
    const std::string text = line(row);
    widest = std::max(widest, width_of(text) - 1);
    body += text;
  }
  return out + std::string(widest, '-') + "\n" + body;
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
