// SPDX-License-Identifier: Apache-2.0
#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "report/html.hpp"

namespace weft::program {
namespace {

// Sizes in pixels.
constexpr double kCanvasWidth = 760;
constexpr double kLeft = 66;
constexpr double kRight = kCanvasWidth - 18;
constexpr double kTop = 44;
constexpr double kHeight = 230;
constexpr double kLabelWidth = 6.6;  // of one character, about
constexpr double kLabelHeight = 14;
constexpr double kAxisRoom = 44;    // below the plot: numbers and label
constexpr double kLegendRoom = 22;  // below that
constexpr double kScaleWidth = 86;  // the colour scale on the right of a heat map
constexpr double kLaneHeight = 58;
constexpr double kLeastWidth = 0.5;  // shorter work is still seen

constexpr size_t kMarkedPoints = 24;    // a line of at most so many points shows each of them
constexpr size_t kMostColumns = 160;    // of a heat map; more are averaged in groups
constexpr size_t kMostNamedCells = 64;  // so few show their value
constexpr size_t kMostTitledCells = 1500;

constexpr std::string_view kStart = "start";
constexpr std::string_view kMiddle = "middle";
constexpr std::string_view kEnd = "end";

double as_double(size_t count) {
  return static_cast<double>(count);
}

// 0.25, 1200, 64k, 1.5M
std::string tick_text(double value) {
  const double size = std::abs(value);
  const auto [unit, letter] = size >= 1e9   ? std::pair(1e9, "G")
                              : size >= 1e6 ? std::pair(1e6, "M")
                              : size >= 1e4 ? std::pair(1e3, "k")
                                            : std::pair(1.0, "");
  return fmt::format("{:.4g}{}", size < 1e-12 ? 0.0 : value / unit, letter);
}

// Values laid along a span of pixels.
struct Axis {
  double low = 0;
  double high = 1;
  double first_px = 0;  // where `low` lies
  double last_px = 1;
  bool is_log = false;
  std::vector<std::string> names = {};  // name i stands for the values from i to i + 1

  [[nodiscard]] double px(double value) const {
    const auto place = [&](double v) { return is_log ? std::log(v) : v; };
    const double span = place(high) - place(low);
    const double part = span != 0 ? (place(value) - place(low)) / span : 0.5;
    return first_px + part * (last_px - first_px);
  }

  // About `wanted` round numbers; on a logarithmic axis powers of two, or of ten where it is wide.
  [[nodiscard]] std::vector<double> ticks(double wanted) const {
    if (!(high > low)) {
      return {low};
    }
    std::vector<double> ticks;
    if (is_log) {
      const double base = high / low > 5000 ? 10 : 2;
      double tick = std::pow(base, std::ceil(std::log(low) / std::log(base) - 1e-9));
      while (tick <= high * 1.000001) {
        ticks.push_back(tick);
        tick *= base;
      }
      return ticks;
    }
    const double rough = (high - low) / wanted;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    const double digit = rough / power * 0.999;
    const double step = power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
    double count = std::ceil(low / step - 1e-9);
    while (count * step <= high + 1e-9 * step) {
      ticks.push_back(count * step);
      ++count;
    }
    return ticks;
  }

  // Labels along the axis and where they are: names, or every n-th of them if one takes `name_px`;
  // else some numbers.
  [[nodiscard]] std::vector<std::pair<double, std::string>> labels(double name_px, int num) const {
    std::vector<std::pair<double, std::string>> labels;
    if (names.empty()) {
      for (const double tick : ticks(num)) {
        labels.emplace_back(px(tick), tick_text(tick));
      }
      return labels;
    }
    const double most = std::abs(last_px - first_px) / name_px;
    const Axis indices = {0, as_double(names.size())};
    for (const double index : indices.ticks(std::clamp(most, 1.0, indices.high))) {
      if (index < indices.high) {
        labels.emplace_back(px(index + 0.5), names[static_cast<size_t>(index)]);
      }
    }
    return labels;
  }
};

// Axis of all values that are finite.
Axis axis_of(const std::vector<Series>& series, std::vector<double> Series::*values) {
  Axis axis = {INFINITY, -INFINITY};
  for (const Series& one : series) {
    for (const double value : one.*values) {
      if (std::isfinite(value)) {
        axis.low = std::min(axis.low, value);
        axis.high = std::max(axis.high, value);
      }
    }
  }
  return axis.low <= axis.high ? axis : Axis();
}

Axis axis_of(const std::vector<std::string>& names) {
  return {.high = std::max(as_double(names.size()), 1.0), .names = names};
}

std::string fill(size_t series) {
  return fmt::format("style=\"fill:{}\"", series_color(series));
}

// A figure that grows: a plot between two axes, and what all charts draw around it.
class Picture {
 public:
  Picture(Axis x, Axis y, double width = kRight - kLeft, double height = kHeight)
      : x_(std::move(x)), y_(std::move(y)), right_(kLeft + width), bottom_(kTop + height) {
    x_.first_px = kLeft;
    x_.last_px = right_;
    y_.first_px = y_.names.empty() ? bottom_ : kTop;  // names are read from the top
    y_.last_px = y_.names.empty() ? kTop : bottom_;
    size_t longest = 1;
    for (const std::string& name : x_.names) {
      longest = std::max(longest, name.size());
    }
    for (const auto& [px, label] : x_.labels(kLabelWidth * as_double(longest + 2), 8)) {
      if (x_.names.empty()) {
        path("class=\"grid\"", fmt::format("M{0:.1f} {1}V{2}", px, kTop, bottom_));
      }
      text(px, bottom_ + 17, label);
    }
    for (const auto& [px, label] : y_.labels(kLabelHeight, 5)) {
      if (y_.names.empty()) {
        path("class=\"grid\"", fmt::format("M{} {:.1f}H{}", kLeft, px, right_));
      }
      text(kLeft - 8, px + 4, label, kEnd);
    }
    path("class=\"axes\"", fmt::format("M{0} {1}V{2}H{3}", kLeft, kTop, bottom_, right_));
  }

  [[nodiscard]] const Axis& x() const { return x_; }
  [[nodiscard]] const Axis& y() const { return y_; }
  [[nodiscard]] double right() const { return right_; }
  [[nodiscard]] double bottom() const { return bottom_; }

  // Writes words at a point in pixels; they look like those at an axis unless `look` says
  // otherwise.
  void text(
      double x,
      double y,
      std::string_view words,
      std::string_view anchor = kMiddle,
      std::string_view look = "class=\"soft\""
  ) {
    constexpr auto kText = "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" {}>{}</text>\n";
    svg_ += fmt::format(kText, x, y, anchor, look, html_escape(words));
  }

  // Draws a path in pixels.
  void path(std::string_view look, std::string_view steps) {
    svg_ += fmt::format("<path {} d=\"{}\"/>\n", look, steps);
  }

  // Draws a box in pixels.
  void box(
      std::string_view look, double x, double y, double w, double h, std::string_view title = {}
  ) {
    constexpr auto kBox =
        "<rect {} x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\">"
        "<title>{}</title></rect>\n";
    svg_ += fmt::format(kBox, look, x, y, w, h, html_escape(title));
  }

  // From corner to corner, in units of the axes.
  void bar(
      std::string_view look, double x0, double y0, double x1, double y1, std::string_view title
  ) {
    const auto [left, right] = std::minmax({x_.px(x0), x_.px(x1)});
    const auto [top, bottom] = std::minmax({y_.px(y0), y_.px(y1)});
    box(look, left, top, std::max(right - left, kLeastWidth), bottom - top, title);
  }

  // Names and colours of series under the x label, if there are several.
  void legend(const std::vector<std::string>& names) {
    has_legend_ = names.size() > 1;
    double x = kLeft;
    for (size_t i = 0; has_legend_ && i < names.size(); ++i) {
      box(fill(i), x, bottom_ + 52, 12, 8);
      text(x + 17, bottom_ + 60, names[i], kStart, "");
      x += 34 + kLabelWidth * as_double(names[i].size());
    }
  }
  void legend(const std::vector<Series>& series) {
    std::vector<std::string> names;
    for (const Series& one : series) {
      names.push_back(one.name);
    }
    legend(names);
  }

  // All that is drawn, below a title and inside the axes' labels.
  [[nodiscard]] std::string figure(
      std::string_view title, std::string_view x_label, std::string_view y_label
  ) {
    const double y = (kTop + bottom_) / 2;
    text(kLeft, 18, title, kStart, "class=\"title\"");
    text((kLeft + right_) / 2, bottom_ + 36, x_label);
    const auto turned = fmt::format("class=\"soft\" transform=\"rotate(-90 14 {:.1f})\"", y);
    text(14, y, y_label, kMiddle, turned);
    return fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n{3}</svg>\n",
        kCanvasWidth,
        bottom_ + kAxisRoom + (has_legend_ ? kLegendRoom : 0),
        html_escape(title),
        svg_
    );
  }

 private:
  Axis x_;
  Axis y_;
  double right_;
  double bottom_;
  bool has_legend_ = false;
  std::string svg_;
};

// A gap where a value is not finite.
void draw_curve(const Series& series, size_t color, Picture& picture) {
  std::string steps;
  char step = 'M';
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (!std::isfinite(series.y[i])) {
      step = 'M';
      continue;
    }
    const double x = picture.x().px(series.x[i]);
    const double y = picture.y().px(series.y[i]);
    steps += fmt::format("{}{:.1f} {:.1f}", std::exchange(step, 'L'), x, y);
    if (series.y.size() <= kMarkedPoints) {
      const auto [at, value] = std::pair(tick_text(series.x[i]), tick_text(series.y[i]));
      const auto title = fmt::format("{}: {}, {}", series.name, at, value);
      picture.box(fill(color) + " rx=\"3\"", x - 3, y - 3, 6, 6, title);
    }
  }
  picture.path(fmt::format("class=\"line\" style=\"stroke:{}\"", series_color(color)), steps);
}

// One colour whose opacity is the share of the highest value, so that it works on light and dark
// pages. Crisp edges leave no seams.
std::string heat(double share) {
  constexpr auto kHeat = "class=\"heat\" shape-rendering=\"crispEdges\" fill-opacity=\"{:.2f}\"";
  return fmt::format(kHeat, 0.04 + 0.96 * share);
}

}  // namespace

HeatMap with_fewer_columns(const HeatMap& map, size_t most) {
  const size_t num_columns = map.columns.size();
  const size_t group = std::max<size_t>((num_columns + most - 1) / most, 1);
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

std::string svg(const LineChart& chart) {
  Axis x = axis_of(chart.series, &Series::x);
  x.is_log = chart.is_log_x && x.low > 0;
  Axis y = axis_of(chart.series, &Series::y);
  // Room above and below the values; exactly zero at the bottom if asked for or near.
  const double room = 0.06 * std::max(y.high - y.low, std::abs(y.high) * 1e-3);
  const bool is_near_zero = y.low >= 0 && y.low < 0.25 * y.high;
  y.low = chart.starts_at_zero || is_near_zero ? std::min(0.0, y.low) : y.low - room;
  y.high += room > 0 ? room : 1;
  Picture picture(x, y);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    draw_curve(chart.series[i], i, picture);
  }
  picture.legend(chart.series);
  return picture.figure(chart.title, chart.x_label, chart.y_label);
}

std::string svg(const BarChart& chart) {
  const double high = axis_of(chart.series, &Series::y).high;
  const Axis labels = axis_of(chart.labels);
  Picture picture(labels, {0, high > 0 ? high * 1.05 : 1});
  const double gap = labels.high < 100 ? 0.2 : 0.1;  // between groups of bars, each 1 wide
  const size_t num_abreast = chart.is_nested ? 1 : std::max<size_t>(chart.series.size(), 1);
  const double width = (1 - gap) / as_double(num_abreast);
  for (size_t s = chart.series.size(); s-- > 0;) {
    const Series& series = chart.series[s];
    for (size_t i = 0; i < series.y.size(); ++i) {
      const double left = as_double(i) + gap / 2 + (chart.is_nested ? 0 : as_double(s) * width);
      const auto title =
          fmt::format("{} {}: {}", chart.labels[i], series.name, tick_text(series.y[i]));
      picture.bar(fill(s), left, 0, left + width, series.y[i], title);
    }
  }
  picture.legend(chart.series);
  return picture.figure(chart.title, chart.x_label, chart.y_label);
}

std::string svg(const HeatMap& chart) {
  const HeatMap map = with_fewer_columns(chart, kMostColumns);
  const double num_rows = as_double(map.rows.size());
  const double height = std::clamp(num_rows * 18, 100.0, std::max(260.0, num_rows * 3));
  Picture picture(axis_of(map.columns), axis_of(map.rows), kRight - kLeft - kScaleWidth, height);
  double high = map.high;
  if (high == 0 && !map.values.empty()) {
    high = std::ranges::max(map.values);
  }
  for (size_t i = 0; i < map.values.size(); ++i) {
    const size_t r = i / map.columns.size();
    const size_t c = i % map.columns.size();
    const auto [x, y] = std::pair(as_double(c), as_double(r));
    const double share = high > 0 ? std::clamp(map.values[i] / high, 0.0, 1.0) : 0;
    const std::string text = tick_text(map.values[i]);
    const bool has_title = map.values.size() <= kMostTitledCells;
    const auto title = fmt::format("{}, {}: {}", map.rows[r], map.columns[c], text);
    picture.bar(heat(share), x, y, x + 1, y + 1, has_title ? title : "");
    if (map.values.size() <= kMostNamedCells) {
      const auto look = share > 0.5 ? "class=\"on\"" : "";
      picture.text(picture.x().px(x + 0.5), picture.y().px(y + 0.5) + 4, text, kMiddle, look);
    }
  }
  // The colour scale.
  constexpr int kSteps = 24;
  const double x = picture.right() + 16;
  const double step = height / kSteps;
  for (int i = 0; i < kSteps; ++i) {
    picture.box(heat((i + 0.5) / kSteps), x, picture.bottom() - (i + 1) * step, 12, step);
  }
  picture.text(x + 17, kTop + 10, tick_text(high) + (map.high > 0 ? "+" : ""), kStart);
  picture.text(x + 17, picture.bottom(), "0", kStart);
  picture.text(x - 4, kTop - 10, map.value_label, kStart);
  return picture.figure(map.title, map.x_label, map.y_label);
}

std::string svg(const LaneChart& chart) {
  Axis time = {0, 0};
  std::vector<std::string> names;
  for (const LaneRow& lane : chart.lanes) {
    names.push_back(lane.name);
    for (const LaneBar& bar : lane.bars) {
      time.high = std::max(time.high, bar.end);
    }
  }
  const double height = as_double(names.size()) * kLaneHeight;
  Picture picture(time, axis_of(names), kRight - kLeft, height);
  for (size_t i = 0; i < chart.lanes.size(); ++i) {
    for (const LaneBar& bar : chart.lanes[i].bars) {
      const double top = as_double(i) + 0.12;
      const auto title = fmt::format("{}: {:.3f} to {:.3f}", bar.name, bar.begin, bar.end);
      picture.bar(fill(bar.group), bar.begin, top, bar.end, top + 0.76, title);
    }
  }
  if (chart.groups.size() <= kNumColors) {  // then the colours come again, and the line is full
    picture.legend(chart.groups);
  }
  return picture.figure(chart.title, chart.x_label, "");
}

}  // namespace weft::program
