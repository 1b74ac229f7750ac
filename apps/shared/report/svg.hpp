// SPDX-License-Identifier: Apache-2.0
// Small charts as inline SVG. Colours come from the CSS of html.hpp, so that a page reads well on
// light and dark screens.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace weft::program {

struct Series {
  std::string name;
  std::vector<double> x;
  std::vector<double> y;  // as many as x
};

struct LineChart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<Series> series;
  bool is_log_x = false;
  bool starts_at_zero = false;
};

// One group of bars per label, one bar of each series inside it (Series::x is not used): side by
// side, or nested, the first series in front of what it is a part of.
struct BarChart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<std::string> labels;
  std::vector<Series> series;
  bool is_nested = false;
};

struct HeatMap {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::string value_label;
  std::vector<std::string> rows;     // names, top to bottom
  std::vector<std::string> columns;  // names, left to right
  std::vector<double> values;        // [rows, columns], not negative
  double high = 0;                   // value of full colour; 0: the largest
};

// With at most so many columns: where there are more, groups of them are averaged.
[[nodiscard]] HeatMap with_fewer_columns(const HeatMap& map, size_t most);

// Bars of what ran when on a few lanes, each a row; colours tell groups apart.
struct LaneBar {
  std::string name;
  double begin = 0;
  double end = 0;
  size_t group = 0;
};
struct LaneRow {
  std::string name;
  std::vector<LaneBar> bars;
};
struct LaneChart {
  std::string title;
  std::string x_label;
  std::vector<LaneRow> lanes;
  std::vector<std::string> groups;  // their names
};

[[nodiscard]] std::string svg(const LineChart& chart);
[[nodiscard]] std::string svg(const BarChart& chart);
[[nodiscard]] std::string svg(const HeatMap& chart);
[[nodiscard]] std::string svg(const LaneChart& chart);

}  // namespace weft::program
