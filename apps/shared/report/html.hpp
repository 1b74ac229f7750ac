// SPDX-License-Identifier: Apache-2.0
// One self-contained report page: no script, no link to elsewhere.
#pragma once

#include <string>
#include <string_view>

#include "report/table.hpp"

namespace weft::program {

[[nodiscard]] std::string html_escape(std::string_view text);

// Colours of the series of a chart, as CSS; they come again after the last one.
inline constexpr size_t kNumColors = 6;
[[nodiscard]] std::string series_color(size_t series);

class Page {
 public:
  explicit Page(std::string title) : title_(std::move(title)) {}

  void add_heading(std::string_view text) { add_element("h2", text); }
  void add_text(std::string_view text) { add_element("p", text); }
  void add_preformatted(std::string_view text) { add_element("pre", text); }
  void add_table(const Table& table);
  void add_figure(std::string_view svg, std::string_view caption = {});

  [[nodiscard]] std::string html() const;
  // A reader sees the old page or the whole new one. Throws Error (kFile).
  void save(const std::string& path) const;

 private:
  void add_element(std::string_view tag, std::string_view text);

  std::string title_;
  std::string body_;
};

}  // namespace weft::program
