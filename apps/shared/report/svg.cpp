// SPDX-License-Identifier: Apache-2.0
#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "report/html.hpp"

namespace weft::program {
namespace {

constexpr double kCanvasWidth = 760;
constexpr size_t kNumColors = 6;      // of html.cpp's style
constexpr double kLabelWidth = 6.6;   // of one character, about
constexpr double kAxisRoom = 44;      // below the plot: numbers and label
constexpr double kLegendRoom = 22;    // below that
constexpr size_t kMarkedPoints = 24;  // a line of at most so many points shows each of them

constexpr size_t kMostColumns = 160;    // of a heat map; more are averaged in groups
constexpr size_t kMostNamedCells = 64;  // so few show their value
constexpr size_t kMostTitledCells = 1500;
constexpr double kScaleWidth = 86;  // the colour scale on the right

constexpr double kLaneHeight = 44;
constexpr double kLaneGap = 14;
constexpr double kLeastWidth = 0.5;  // pixels: shorter work is still seen

constexpr std::string_view kStart = "start";
constexpr std::string_view kMiddle = "middle";
constexpr std::string_view kEnd = "end";

// The elements of a picture.
constexpr std::string_view kText =
    "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n";
constexpr std::string_view kYLabel =
    "<text x=\"{0:.1f}\" y=\"{1:.1f}\" text-anchor=\"middle\" class=\"soft\" "
    "transform=\"rotate(-90 {0:.1f} {1:.1f})\">{2}</text>\n";
constexpr std::string_view kRectangle =
    "<rect {} x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\">{}</rect>\n";
constexpr std::string_view kGridLine =
    "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n";
constexpr std::string_view kMark =
    "<circle class=\"f{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{}: {}, "
    "{}</title></circle>\n";
constexpr std::string_view kSvg =
    "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
    "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n";

double as_double(size_t count) {
  return static_cast<double>(count);
}

// A span of values laid along a span of pixels.
struct Scale {
  double low = 0;
  double high = 1;
  double first_px = 0;  // where `low` lies
  double last_px = 1;
  bool is_log = false;

  [[nodiscard]] double px(double value) const {
    const auto place = [&](double v) { return is_log ? std::log(v) : v; };
    const double span = place(high) - place(low);
    const double part = span > 0 ? (place(value) - place(low)) / span : 0.5;
    return first_px + part * (last_px - first_px);
  }
};

// Round numbers that cover [low, high], about `wanted` of them.
std::vector<double> round_ticks(double low, double high, int wanted) {
  if (!(high > low)) {
    return {low};
  }
  const double rough = (high - low) / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.5, 2.0, 1.0}) {
    step = factor * power >= rough * 0.999 ? factor * power : step;
  }
  std::vector<double> ticks;
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) {
    ticks.push_back(i * step);
  }
  return ticks;
}

// Powers of two, or of ten for a wide span.
std::vector<double> log_ticks(double low, double high) {
  const double base = high / low > 5000 ? 10 : 2;
  std::vector<double> ticks;
  double i = std::ceil(std::log(low) / std::log(base) - 1e-9);
  for (double tick = std::pow(base, i); tick <= high * 1.000001; tick = std::pow(base, ++i)) {
    ticks.push_back(tick);
  }
  return ticks;
}

// 0.25, 1200, 64k, 1.5M
std::string tick_text(double value) {
  const double size = std::abs(value);
  for (const auto& [unit, least, letter] :
       {std::tuple(1e9, 1e9, 'G'), {1e6, 1e6, 'M'}, {1e3, 1e4, 'k'}}) {
    if (size >= least) {
      return fmt::format("{:.4g}{}", value / unit, letter);
    }
  }
  return fmt::format("{:.4g}", size < 1e-12 ? 0.0 : value);
}

// How many of `num_names` names, each `name_px` long, to skip from one shown to the next in
// `room_px`: 1, 2, 5, 10, 20, ...
size_t label_stride(size_t num_names, double name_px, double room_px) {
  const double wanted = name_px * as_double(num_names) / room_px;
  for (size_t power = 1;; power *= 10) {
    for (const size_t factor : {size_t{1}, size_t{2}, size_t{5}}) {
      if (as_double(factor * power) >= wanted) {
        return factor * power;
      }
    }
  }
}

// A figure that grows: the plot's inner rectangle in pixels, and what all charts draw around it.
struct Picture {
  double left = 66;
  double top = 44;
  double width = kCanvasWidth - 66 - 18;
  double height = 230;
  bool has_legend = false;
  std::string svg = {};

  [[nodiscard]] double right() const { return left + width; }
  [[nodiscard]] double bottom() const { return top + height; }

  void text(
      double x, double y, std::string_view words, std::string_view anchor, std::string_view look
  ) {
    const auto css = look.empty() ? std::string() : fmt::format(" class=\"{}\"", look);
    svg += fmt::format(kText, x, y, anchor, css, html_escape(words));
  }

  // A number or a name at an axis.
  void axis_text(double x, double y, std::string_view words, std::string_view anchor = kMiddle) {
    text(x, y, words, anchor, "soft");
  }

  void rectangle(
      std::string_view look, double x, double y, double w, double h, std::string_view title = {}
  ) {
    const auto told =
        title.empty() ? std::string() : fmt::format("<title>{}</title>", html_escape(title));
    svg += fmt::format(kRectangle, look, x, y, w, h, told);
  }

  // In the colour of a series.
  void bar(size_t series, double x, double y, double w, double h, const std::string& title) {
    rectangle(fmt::format("class=\"f{}\"", series % kNumColors), x, y, w, h, title);
  }

  // Grid lines with their numbers on the left.
  void y_axis(const Scale& scale) {
    for (const double tick : round_ticks(scale.low, scale.high, 5)) {
      const double y = scale.px(tick);
      svg += fmt::format(kGridLine, left, y, right(), y);
      axis_text(left - 8, y + 4, tick_text(tick), kEnd);
    }
  }

  // Numbers below the plot, with lines up to its top if wanted.
  void x_axis(const Scale& scale, bool has_lines) {
    for (const double tick :
         scale.is_log ? log_ticks(scale.low, scale.high) : round_ticks(scale.low, scale.high, 8)) {
      const double x = scale.px(tick);
      svg += has_lines ? fmt::format(kGridLine, x, top, x, bottom()) : "";
      axis_text(x, bottom() + 17, tick_text(tick));
    }
  }

  // Names under columns of equal width; every n-th where they would touch.
  void names_below(const std::vector<std::string>& names) {
    size_t longest = 1;
    for (const auto& name : names) {
      longest = std::max(longest, name.size());
    }
    const double room = width / as_double(names.size());
    const size_t stride = label_stride(names.size(), kLabelWidth * as_double(longest + 2), width);
    for (size_t i = 0; i < names.size(); i += stride) {
      axis_text(left + (as_double(i) + 0.5) * room, bottom() + 17, names[i]);
    }
  }

  // The names that name_of() says of each, under the x label.
  template <class Range, class NameOf>
  void legend(const Range& range, NameOf name_of) {
    double x = left;
    for (size_t i = 0; has_legend && i < range.size(); ++i) {
      const std::string& name = std::invoke(name_of, range[i]);
      const double y = bottom() + 52;
      rectangle(fmt::format("class=\"f{}\" rx=\"2\"", i % kNumColors), x, y, 12, 8);
      text(x + 17, y + 8, name, kStart, "");
      x += 34 + kLabelWidth * as_double(name.size());
    }
  }

  // All that is drawn, below the chart's title and inside its axis labels.
  template <class Chart>
  [[nodiscard]] std::string figure(const Chart& chart, std::string_view y_label) const {
    Picture around = *this;
    const double height_px = bottom() + kAxisRoom + (has_legend ? kLegendRoom : 0);
    around.svg = fmt::format(kSvg, kCanvasWidth, height_px, html_escape(chart.title));
    around.text(left, 18, chart.title, kStart, "title");
    around.axis_text(left + width / 2, bottom() + 36, chart.x_label);
    around.svg += fmt::format(kYLabel, 14.0, top + height / 2, html_escape(y_label));
    return around.svg + svg + "</svg>\n";
  }
};

// --- lines ---

struct Bounds {
  double low = 0;
  double high = 0;
};

Bounds bounds_of(const std::vector<Series>& series, std::vector<double> Series::*values) {
  Bounds out = {INFINITY, -INFINITY};
  for (const Series& one : series) {
    for (const double value : one.*values) {
      if (std::isfinite(value)) {
        out = {std::min(out.low, value), std::max(out.high, value)};
      }
    }
  }
  return out.low <= out.high ? out : Bounds{0, 1};
}

// Room above and below the values; exactly zero at the bottom if asked for or near.
Bounds with_room(Bounds values, bool starts_at_zero) {
  const double room = 0.06 * std::max(values.high - values.low, std::abs(values.high) * 1e-3);
  const bool is_near_zero = values.low >= 0 && values.low < 0.25 * values.high;
  const double low = starts_at_zero || is_near_zero ? std::min(0.0, values.low) : values.low - room;
  return {low, values.high + (room > 0 ? room : 1)};
}

// A gap where a value is not finite.
std::string curve(const Series& series, size_t color, const Scale& x, const Scale& y) {
  std::string path;
  std::string marks;
  char step = 'M';
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (!std::isfinite(series.y[i])) {
      step = 'M';
      continue;
    }
    const double px = x.px(series.x[i]);
    const double py = y.px(series.y[i]);
    path += fmt::format("{}{:.1f} {:.1f}", std::exchange(step, 'L'), px, py);
    if (series.y.size() <= kMarkedPoints) {
      const auto [at, value] = std::pair(tick_text(series.x[i]), tick_text(series.y[i]));
      marks += fmt::format(kMark, color, px, py, series.name, at, value);
    }
  }
  return fmt::format("<path class=\"line s{}\" d=\"{}\"/>\n{}", color, path, marks);
}

// --- heat maps ---

HeatMap with_fewer_columns(HeatMap map) {
  const size_t num_columns = map.columns.size();
  const size_t group = (num_columns + kMostColumns - 1) / kMostColumns;
  if (group <= 1) {
    return map;
  }
  HeatMap fewer = map;
  fewer.columns.clear();
  fewer.values.clear();
  for (size_t c = 0; c < num_columns; c += group) {
    fewer.columns.push_back(map.columns[c]);
  }
  for (size_t r = 0; r < map.rows.size(); ++r) {
    const auto row = std::span(map.values).subspan(r * num_columns, num_columns);
    for (size_t c = 0; c < num_columns; c += group) {
      const auto cells = row.subspan(c, std::min(group, num_columns - c));
      const double sum = std::accumulate(cells.begin(), cells.end(), 0.0);
      fewer.values.push_back(sum / as_double(cells.size()));
    }
  }
  return fewer;
}

// One colour whose opacity is the share of the highest value, so that it works on light and dark
// pages.
std::string heat(double share) {
  return fmt::format("class=\"heat\" fill-opacity=\"{:.2f}\"", 0.04 + 0.96 * share);
}

void draw_cells(const HeatMap& map, double high, Picture& picture) {
  const double width = picture.width / as_double(std::max<size_t>(map.columns.size(), 1));
  const double height = picture.height / as_double(std::max<size_t>(map.rows.size(), 1));
  picture.svg += "<g shape-rendering=\"crispEdges\">\n";
  for (size_t i = 0; i < map.values.size(); ++i) {
    const size_t r = i / map.columns.size();
    const size_t c = i % map.columns.size();
    const double x = picture.left + as_double(c) * width;
    const double y = picture.top + as_double(r) * height;
    const double share = high > 0 ? std::clamp(map.values[i] / high, 0.0, 1.0) : 0;
    const std::string text = tick_text(map.values[i]);
    const bool has_title = map.values.size() <= kMostTitledCells;
    const auto title =
        has_title ? fmt::format("{}, {}: {}", map.rows[r], map.columns[c], text) : std::string();
    picture.rectangle(heat(share), x, y, width, height, title);
    if (map.values.size() <= kMostNamedCells) {
      picture.text(x + width / 2, y + height / 2 + 4, text, kMiddle, share > 0.5 ? "on" : "");
    }
  }
  picture.svg += "</g>\n";
  // Names of rows; every n-th where they would touch.
  for (size_t r = 0; r < map.rows.size(); r += label_stride(map.rows.size(), 14, picture.height)) {
    const double y = picture.top + (as_double(r) + 0.5) * height + 4;
    picture.axis_text(picture.left - 8, y, map.rows[r], kEnd);
  }
}

void draw_color_scale(const HeatMap& map, double high, Picture& picture) {
  constexpr int kSteps = 24;
  const double x = picture.right() + 16;
  const double step = picture.height / kSteps;
  picture.svg += "<g shape-rendering=\"crispEdges\">\n";
  for (int i = 0; i < kSteps; ++i) {
    picture.rectangle(heat((i + 0.5) / kSteps), x, picture.bottom() - (i + 1) * step, 12, step);
  }
  picture.svg += "</g>\n";
  picture.axis_text(x + 17, picture.top + 10, tick_text(high) + (map.high > 0 ? "+" : ""), kStart);
  picture.axis_text(x + 17, picture.bottom(), "0", kStart);
  picture.axis_text(x - 4, picture.top - 10, map.value_label, kStart);
}

}  // namespace

std::string svg(const LineChart& chart) {
  Picture picture = {.has_legend = chart.series.size() > 1};
  const Bounds xs = bounds_of(chart.series, &Series::x);
  const Bounds ys = with_room(bounds_of(chart.series, &Series::y), chart.starts_at_zero);
  const Scale x = {
      xs.low, xs.high, picture.left, picture.right() - 8, chart.is_log_x && xs.low > 0};
  const Scale y = {ys.low, ys.high, picture.bottom(), picture.top};
  picture.y_axis(y);
  picture.x_axis(x, false);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    picture.svg += curve(chart.series[i], i % kNumColors, x, y);
  }
  picture.legend(chart.series, &Series::name);
  return picture.figure(chart, chart.y_label);
}

std::string svg(const BarChart& chart) {
  Picture picture = {.has_legend = chart.series.size() > 1};
  double high = 0;
  for (const Series& series : chart.series) {
    high = std::accumulate(series.y.begin(), series.y.end(), high, [](double a, double b) {
      return std::max(a, b);
    });
  }
  const Scale y = {0, high > 0 ? high * 1.05 : 1, picture.bottom(), picture.top};
  const double room = picture.width / as_double(std::max<size_t>(chart.labels.size(), 1));
  const double gap = room > 6 ? room * 0.2 : room * 0.1;
  const size_t num_abreast = chart.is_nested ? 1 : std::max<size_t>(chart.series.size(), 1);
  const double width = (room - gap) / as_double(num_abreast);
  picture.y_axis(y);
  picture.names_below(chart.labels);
  for (size_t s = chart.series.size(); s-- > 0;) {
    const Series& series = chart.series[s];
    const double shift = chart.is_nested ? 0 : as_double(s) * width;
    for (size_t i = 0; i < series.y.size(); ++i) {
      const double x = picture.left + as_double(i) * room + gap / 2 + shift;
      const double top = y.px(series.y[i]);
      const auto title =
          fmt::format("{} {}: {}", chart.labels[i], series.name, tick_text(series.y[i]));
      picture.bar(s, x, top, width, picture.bottom() - top, title);
    }
  }
  picture.legend(chart.series, &Series::name);
  return picture.figure(chart, chart.y_label);
}

std::string svg(const HeatMap& chart) {
  const HeatMap map = with_fewer_columns(chart);
  Picture picture;
  picture.width -= kScaleWidth;
  const double num_rows = as_double(map.rows.size());
  picture.height = std::clamp(num_rows * 18, 100.0, std::max(260.0, num_rows * 3));
  const double num_columns = as_double(std::max<size_t>(map.columns.size(), 1));
  if (picture.width / num_columns > 3) {  // whole pixels leave no seams
    picture.width = std::floor(picture.width / num_columns) * num_columns;
  }
  double high = map.high;
  if (high == 0 && !map.values.empty()) {
    high = std::ranges::max(map.values);
  }
  draw_cells(map, high, picture);
  picture.names_below(map.columns);
  draw_color_scale(map, high, picture);
  return picture.figure(map, map.y_label);
}

std::string svg(const LaneChart& chart) {
  Picture picture;
  picture.height = as_double(chart.lanes.size()) * (kLaneHeight + kLaneGap);
  // Colours come again after the last one, and the line is full.
  picture.has_legend = chart.groups.size() > 1 && chart.groups.size() <= kNumColors;
  double end = 0;
  for (const LaneRow& lane : chart.lanes) {
    for (const LaneBar& bar : lane.bars) {
      end = std::max(end, bar.end);
    }
  }
  const Scale scale = {0, end > 0 ? end : 1, picture.left, picture.right()};
  picture.x_axis(scale, true);
  double y = picture.top + kLaneGap / 2;
  for (const LaneRow& lane : chart.lanes) {
    picture.text(picture.left - 6, y + kLaneHeight / 2 + 4, lane.name, kEnd, "");
    for (const LaneBar& bar : lane.bars) {
      const double left = scale.px(bar.begin);
      const double width = std::max(scale.px(bar.end) - left, kLeastWidth);
      const auto title = fmt::format("{}: {:.3f} to {:.3f}", bar.name, bar.begin, bar.end);
      picture.bar(bar.group, left, y, width, kLaneHeight, title);
    }
    y += kLaneHeight + kLaneGap;
  }
  picture.legend(chart.groups, std::identity());
  return picture.figure(chart, "");
}

}  // namespace weft::program
