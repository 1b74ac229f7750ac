// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "html.hpp"
#include "svg_axes.hpp"

namespace weft::program {
namespace {

constexpr size_t kMostColumns = 160;    // more are averaged in groups
constexpr size_t kMostNamedCells = 64;  // so few show their value
constexpr size_t kMostTitledCells = 1500;
constexpr double kScaleWidth = 86;  // the colour scale on the right

struct Grid {
  size_t num_rows = 0;
  size_t num_columns = 0;
  double cell_width = 0;
  double cell_height = 0;
  double high = 0;  // the value of full colour
};

HeatMap with_fewer_columns(HeatMap map) {
  const size_t group = (map.columns.size() + kMostColumns - 1) / kMostColumns;
  if (group <= 1) {
    return map;
  }
  std::vector<std::string> columns;
  std::vector<double> values;
  for (size_t c = 0; c < map.columns.size(); c += group) {
    columns.push_back(map.columns[c]);
  }
  for (size_t r = 0; r < map.rows.size(); ++r) {
    for (size_t c = 0; c < map.columns.size(); c += group) {
      const size_t end = std::min(c + group, map.columns.size());
      double sum = 0;
      for (size_t i = c; i < end; ++i) {
        sum += map.values[r * map.columns.size() + i];
      }
      values.push_back(sum / static_cast<double>(end - c));
    }
  }
  map.columns = std::move(columns);
  map.values = std::move(values);
  return map;
}

// One colour whose opacity is the value, so that it works on light and dark pages.
std::string cell(const HeatMap& map, const Grid& grid, const Frame& frame, size_t r, size_t c) {
  const double value = map.values[r * grid.num_columns + c];
  const double part = grid.high > 0 ? std::clamp(value / grid.high, 0.0, 1.0) : 0;
  const double x = frame.left + static_cast<double>(c) * grid.cell_width;
  const double y = frame.top + static_cast<double>(r) * grid.cell_height;
  const size_t num_cells = grid.num_rows * grid.num_columns;
  std::string title;
  if (num_cells <= kMostTitledCells) {
    title = fmt::format(
        "<title>{}, {}: {}</title>",
        html_escape(map.rows[r]),
        html_escape(map.columns[c]),
        tick_text(value)
    );
  }
  std::string out = fmt::format(
      "<rect class=\"heat\" fill-opacity=\"{:.2f}\" x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" "
      "height=\"{:.2f}\">{}</rect>\n",
      0.04 + 0.96 * part,
      x,
      y,
      grid.cell_width,
      grid.cell_height,
      title
  );
  if (num_cells <= kMostNamedCells) {
    out += svg_text(
        x + grid.cell_width / 2,
        y + grid.cell_height / 2 + 4,
        tick_text(value),
        Anchor::kMiddle,
        part > 0.5 ? "on" : ""
    );
  }
  return out;
}

// Names along an edge; every n-th where they would touch.
std::string edge_labels(const HeatMap& map, const Grid& grid, const Frame& frame) {
  std::string out;
  const size_t every_row = label_stride(grid.num_rows, 14, frame.height);
  for (size_t r = 0; r < grid.num_rows; r += every_row) {
    const double y = frame.top + (static_cast<double>(r) + 0.5) * grid.cell_height + 4;
    out += svg_text(frame.left - 8, y, map.rows[r], Anchor::kEnd, "soft");
  }
  size_t longest = 1;
  for (const auto& name : map.columns) {
    longest = std::max(longest, name.size());
  }
  const double wanted = 6.6 * static_cast<double>(longest + 2);
  const size_t every = label_stride(grid.num_columns, wanted, frame.width);
  for (size_t c = 0; c < grid.num_columns; c += every) {
    const double x = frame.left + (static_cast<double>(c) + 0.5) * grid.cell_width;
    out += svg_text(x, frame.bottom() + 17, map.columns[c], Anchor::kMiddle, "soft");
  }
  return out;
}

std::string color_scale(const HeatMap& map, const Grid& grid, const Frame& frame) {
  constexpr int kSteps = 24;
  const double x = frame.right() + 16;
  const double step = frame.height / kSteps;
  std::string out = "<g shape-rendering=\"crispEdges\">\n";
  for (int i = 0; i < kSteps; ++i) {
    out += fmt::format(
        "<rect class=\"heat\" fill-opacity=\"{:.2f}\" x=\"{:.1f}\" y=\"{:.2f}\" width=\"12\" "
        "height=\"{:.2f}\"/>\n",
        0.04 + 0.96 * (i + 0.5) / kSteps,
        x,
        frame.bottom() - (i + 1) * step,
        step
    );
  }
  const std::string most = tick_text(grid.high) + (map.high > 0 ? "+" : "");
  out += "</g>\n" + svg_text(x + 17, frame.top + 10, most, Anchor::kStart, "soft");
  out += svg_text(x + 17, frame.bottom(), "0", Anchor::kStart, "soft");
  return out + svg_text(x - 4, frame.top - 10, map.value_label, Anchor::kStart, "soft");
}

}  // namespace

std::string svg(const HeatMap& chart) {
  const HeatMap map = with_fewer_columns(chart);
  Frame frame;
  frame.width -= kScaleWidth;
  const auto num_rows = static_cast<double>(map.rows.size());
  frame.height = std::clamp(num_rows * 18, 100.0, std::max(260.0, num_rows * 3));
  Grid grid = {map.rows.size(), map.columns.size()};
  const auto num_columns = static_cast<double>(std::max<size_t>(grid.num_columns, 1));
  grid.cell_width = frame.width / num_columns;
  if (grid.cell_width > 3) {  // whole pixels leave no seams
    grid.cell_width = std::floor(grid.cell_width);
    frame.width = grid.cell_width * num_columns;
  }
  grid.cell_height = frame.height / std::max(num_rows, 1.0);
  grid.high = map.high;
  if (grid.high == 0 && !map.values.empty()) {
    grid.high = *std::max_element(map.values.begin(), map.values.end());
  }
  std::string inner = "<g shape-rendering=\"crispEdges\">\n";
  for (size_t r = 0; r < grid.num_rows; ++r) {
    for (size_t c = 0; c < grid.num_columns; ++c) {
      inner += cell(map, grid, frame, r, c);
    }
  }
  inner += "</g>\n" + edge_labels(map, grid, frame) + color_scale(map, grid, frame);
  return svg_figure(frame, {map.title, map.x_label, map.y_label}, inner);
}

}  // namespace weft::program
