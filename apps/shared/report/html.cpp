// SPDX-License-Identifier: Apache-2.0
#include "report/html.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/atomic_file.hpp"

namespace weft::program {
namespace {

// Six series colours that stay apart in both modes and for most colour-blind readers.
constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1b1f24; --soft: #6a737d; --rule: #d9dee3;
  --c0: #0b65c2; --c1: #c8500b; --c2: #1a7f4b; --c3: #8a3fb0; --c4: #a67c00; --c5: #c2255c;
  --heat: #084a91; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14171a; --fg: #e3e6e8; --soft: #9aa4ad; --rule: #333a41;
    --c0: #6cb2ff; --c1: #ff9d5c; --c2: #5fd39a; --c3: #d29bf0; --c4: #e0bf4a; --c5: #ff85ad;
    --heat: #7cc0ff; }
}
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
pre, .wide { overflow-x: auto; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; white-space: nowrap; }
figure { margin: 1.2rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
svg { max-width: 100%; min-width: 36rem; height: auto; }
svg text { fill: var(--fg); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .title { font-size: 14px; font-weight: 600; }
svg .grid, svg .axes { fill: none; stroke: var(--rule); stroke-width: 1; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .heat { fill: var(--heat); } svg text.on { fill: var(--bg); }
)";

std::string table_line(
    const Table& table, const std::vector<std::string>& cells, std::string_view tag
) {
  std::string out = "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    const char* side = table.is_number_column(i) ? " class=\"n\"" : "";
    out += fmt::format("<{0}{1}>{2}</{0}>", tag, side, html_escape(cells[i]));
  }
  return out + "</tr>\n";
}

}  // namespace

std::string html_escape(std::string_view text) {
  static constexpr std::array<std::pair<char, const char*>, 4> kEscapes = {
      {{'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}}};
  std::string out;
  for (const char c : text) {
    const auto* found = std::ranges::find(kEscapes, c, &std::pair<char, const char*>::first);
    found == kEscapes.end() ? out.push_back(c) : static_cast<void>(out.append(found->second));
  }
  return out;
}

std::string series_color(size_t series) {
  return fmt::format("var(--c{})", series % kNumColors);
}

void Page::add_element(std::string_view tag, std::string_view text) {
  body_ += fmt::format("<{0}>{1}</{0}>\n", tag, html_escape(text));
}

void Page::add_table(const Table& table) {
  body_ += "<div class=\"wide\"><table>\n" + table_line(table, table.header(), "th");
  for (const auto& row : table.rows()) {
    body_ += table_line(table, row, "td");
  }
  body_ += "</table></div>\n";
}

void Page::add_figure(std::string_view svg, std::string_view caption) {
  body_ += fmt::format("<figure>\n<div class=\"wide\">\n{}</div>\n", svg);
  if (!caption.empty()) {
    add_element("figcaption", caption);
  }
  body_ += "</figure>\n";
}

std::string Page::html() const {
  const std::string title = html_escape(title_);
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}</style>\n</head>\n<body>\n<h1>{0}</h1>\n{2}</body>\n</"
      "html>\n",
      title,
      kStyle,
      body_
  );
}

void Page::save(const std::string& path) const {
  write_file_atomically(path, html());
}

}  // namespace weft::program
