// SPDX-License-Identifier: Apache-2.0
#include "report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>

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

// --- canvas, scales, ticks, labels and the legend: what all charts share ---

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

// The plot's inner rectangle in pixels.
struct Frame {
  double left = 66;
  double top = 44;
  double width = kCanvasWidth - 66 - 18;
  double height = 230;
  bool has_legend = false;
  [[nodiscard]] double right() const { return left + width; }
  [[nodiscard]] double bottom() const { return top + height; }
};

// Round numbers that cover [low, high], about `wanted` of them.
std::vector<double> round_ticks(double low, double high, int wanted) {
  if (!(high > low)) {
    return {low};
  }
  const double rough = (high - low) / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= rough * 0.999) {
      step = factor * power;
      break;
    }
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
  for (double i = std::ceil(std::log(low) / std::log(base) - 1e-9);; ++i) {
    const double tick = std::pow(base, i);
    if (tick > high * 1.000001) {
      return ticks;
    }
    ticks.push_back(tick);
  }
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

constexpr std::string_view kStart = "start";
constexpr std::string_view kMiddle = "middle";
constexpr std::string_view kEnd = "end";

std::string svg_text(
    double x, double y, std::string_view text, std::string_view anchor, std::string_view css_class
) {
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n",
      x,
      y,
      anchor,
      css_class.empty() ? "" : fmt::format(" class=\"{}\"", css_class),
      html_escape(text)
  );
}

// A number or a name beside an axis.
std::string axis_text(
    double x, double y, std::string_view text, std::string_view anchor = kMiddle
) {
  return svg_text(x, y, text, anchor, "soft");
}

std::string rectangle(
    std::string_view look, double x, double y, double width, double height, std::string_view title
) {
  return fmt::format(
      "<rect {} x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\">{}</rect>\n",
      look,
      x,
      y,
      width,
      height,
      title.empty() ? "" : fmt::format("<title>{}</title>", html_escape(title))
  );
}

std::string grid_line(double x1, double y1, double x2, double y2) {
  return fmt::format(
      "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
      x1,
      y1,
      x2,
      y2
  );
}

// Grid lines with their numbers on the left.
std::string y_axis(const Frame& frame, const Scale& scale) {
  std::string out;
  for (const double tick : round_ticks(scale.low, scale.high, 5)) {
    const double y = scale.px(tick);
    out += grid_line(frame.left, y, frame.right(), y);
    out += axis_text(frame.left - 8, y + 4, tick_text(tick), kEnd);
  }
  return out;
}

// Numbers below the plot, with lines up to its top if wanted.
std::string x_axis(const Frame& frame, const Scale& scale, bool has_lines) {
  std::string out;
  for (const double tick :
       scale.is_log ? log_ticks(scale.low, scale.high) : round_ticks(scale.low, scale.high, 8)) {
    const double x = scale.px(tick);
    out += has_lines ? grid_line(x, frame.top, x, frame.bottom()) : "";
    out += axis_text(x, frame.bottom() + 17, tick_text(tick));
  }
  return out;
}

// How many of `num_names` names, each `name_px` long, to skip from one shown to the next in
// `room_px`: 1, 2, 5, 10, 20, ...
size_t label_stride(size_t num_names, double name_px, double room_px) {
  const double wanted = name_px * static_cast<double>(num_names) / room_px;
  for (size_t power = 1;; power *= 10) {
    for (const size_t factor : {size_t{1}, size_t{2}, size_t{5}}) {
      if (static_cast<double>(factor * power) >= wanted) {
        return factor * power;
      }
    }
  }
}

// Names under columns of equal width; every n-th where they would touch.
std::string names_below(const Frame& frame, const std::vector<std::string>& names) {
  size_t longest = 1;
  for (const auto& name : names) {
    longest = std::max(longest, name.size());
  }
  const double room = frame.width / static_cast<double>(names.size());
  const double wanted = kLabelWidth * static_cast<double>(longest + 2);
  std::string out;
  for (size_t i = 0; i < names.size(); i += label_stride(names.size(), wanted, frame.width)) {
    const double x = frame.left + (static_cast<double>(i) + 0.5) * room;
    out += axis_text(x, frame.bottom() + 17, names[i]);
  }
  return out;
}

// Names of the series, under the x label.
std::string legend(const Frame& frame, const std::vector<std::string>& names) {
  std::string out;
  double x = frame.left;
  for (size_t i = 0; frame.has_legend && i < names.size(); ++i) {
    const double y = frame.bottom() + 52;
    out += rectangle(fmt::format("class=\"f{}\" rx=\"2\"", i % kNumColors), x, y, 12, 8, "");
    out += svg_text(x + 17, y + 8, names[i], kStart, "");
    x += 34 + kLabelWidth * static_cast<double>(names[i].size());
  }
  return out;
}

std::string legend(const Frame& frame, const std::vector<Series>& series) {
  std::vector<std::string> names;
  for (const Series& one : series) {
    names.push_back(one.name);
  }
  return legend(frame, names);
}

// The whole figure: `<svg>` with title and axis labels around `inner`.
std::string figure(
    const Frame& frame,
    std::string_view title,
    std::string_view x_label,
    std::string_view y_label,
    const std::string& inner
) {
  const double height = frame.bottom() + kAxisRoom + (frame.has_legend ? kLegendRoom : 0);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n",
      kCanvasWidth,
      height,
      html_escape(title)
  );
  out += svg_text(frame.left, 18, title, kStart, "title");
  out += axis_text(frame.left + frame.width / 2, frame.bottom() + 36, x_label);
  out += fmt::format(
      "<text x=\"{0:.1f}\" y=\"{1:.1f}\" text-anchor=\"middle\" class=\"soft\" "
      "transform=\"rotate(-90 {0:.1f} {1:.1f})\">{2}</text>\n",
      14.0,
      frame.top + frame.height / 2,
      html_escape(y_label)
  );
  return out + inner + "</svg>\n";
}

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
  bool is_open = false;
  for (size_t i = 0; i < series.y.size(); ++i) {
    if (!std::isfinite(series.y[i])) {
      is_open = false;
      continue;
    }
    const double px = x.px(series.x[i]);
    const double py = y.px(series.y[i]);
    path += fmt::format("{}{:.1f} {:.1f}", is_open ? "L" : "M", px, py);
    is_open = true;
    if (series.y.size() <= kMarkedPoints) {
      marks += fmt::format(
          "<circle class=\"f{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{}: {}, "
          "{}</title></circle>\n",
          color,
          px,
          py,
          series.name,
          tick_text(series.x[i]),
          tick_text(series.y[i])
      );
    }
  }
  return fmt::format("<path class=\"line s{}\" d=\"{}\"/>\n{}", color, path, marks);
}

// --- heat maps ---

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

// One colour whose opacity is the share of the highest value, so that it works on light and dark
// pages.
std::string heat(double share) {
  return fmt::format("class=\"heat\" fill-opacity=\"{:.2f}\"", 0.04 + 0.96 * share);
}

std::string cells(const HeatMap& map, const Frame& frame, double high) {
  const double width = frame.width / static_cast<double>(std::max<size_t>(map.columns.size(), 1));
  const double height = frame.height / static_cast<double>(std::max<size_t>(map.rows.size(), 1));
  std::string out = "<g shape-rendering=\"crispEdges\">\n";
  for (size_t i = 0; i < map.values.size(); ++i) {
    const size_t r = i / map.columns.size();
    const size_t c = i % map.columns.size();
    const double x = frame.left + static_cast<double>(c) * width;
    const double y = frame.top + static_cast<double>(r) * height;
    const double share = high > 0 ? std::clamp(map.values[i] / high, 0.0, 1.0) : 0;
    const std::string text = tick_text(map.values[i]);
    const bool has_title = map.values.size() <= kMostTitledCells;
    const auto title =
        has_title ? fmt::format("{}, {}: {}", map.rows[r], map.columns[c], text) : std::string();
    out += rectangle(heat(share), x, y, width, height, title);
    if (map.values.size() <= kMostNamedCells) {
      const char* look = share > 0.5 ? "on" : "";
      out += svg_text(x + width / 2, y + height / 2 + 4, text, kMiddle, look);
    }
  }
  return out + "</g>\n";
}

// Every n-th where they would touch.
std::string row_names(const HeatMap& map, const Frame& frame) {
  const double height = frame.height / static_cast<double>(std::max<size_t>(map.rows.size(), 1));
  std::string out;
  for (size_t r = 0; r < map.rows.size(); r += label_stride(map.rows.size(), 14, frame.height)) {
    const double y = frame.top + (static_cast<double>(r) + 0.5) * height + 4;
    out += axis_text(frame.left - 8, y, map.rows[r], kEnd);
  }
  return out;
}

std::string color_scale(const HeatMap& map, const Frame& frame, double high) {
  constexpr int kSteps = 24;
  const double x = frame.right() + 16;
  const double step = frame.height / kSteps;
  std::string out = "<g shape-rendering=\"crispEdges\">\n";
  for (int i = 0; i < kSteps; ++i) {
    const double y = frame.bottom() - (i + 1) * step;
    out += rectangle(heat((i + 0.5) / kSteps), x, y, 12, step, "");
  }
  const std::string most = tick_text(high) + (map.high > 0 ? "+" : "");
  out += "</g>\n" + axis_text(x + 17, frame.top + 10, most, kStart);
  out += axis_text(x + 17, frame.bottom(), "0", kStart);
  return out + axis_text(x - 4, frame.top - 10, map.value_label, kStart);
}

}  // namespace

std::string svg(const LineChart& chart) {
  Frame frame;
  frame.has_legend = chart.series.size() > 1;
  const Bounds xs = bounds_of(chart.series, &Series::x);
  const Bounds ys = with_room(bounds_of(chart.series, &Series::y), chart.starts_at_zero);
  const Scale x = {xs.low, xs.high, frame.left, frame.right() - 8, chart.is_log_x && xs.low > 0};
  const Scale y = {ys.low, ys.high, frame.bottom(), frame.top};
  std::string inner = y_axis(frame, y) + x_axis(frame, x, false);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    inner += curve(chart.series[i], i % kNumColors, x, y);
  }
  inner += legend(frame, chart.series);
  return figure(frame, chart.title, chart.x_label, chart.y_label, inner);
}

std::string svg(const BarChart& chart) {
  Frame frame;
  frame.has_legend = chart.series.size() > 1;
  double high = 0;
  for (const Series& series : chart.series) {
    for (const double value : series.y) {
      high = std::max(high, value);
    }
  }
  const Scale y = {0, high > 0 ? high * 1.05 : 1, frame.bottom(), frame.top};
  const double room = frame.width / static_cast<double>(std::max<size_t>(chart.labels.size(), 1));
  const double gap = room > 6 ? room * 0.2 : room * 0.1;
  const size_t num_beside = chart.is_nested ? 1 : std::max<size_t>(chart.series.size(), 1);
  const double width = (room - gap) / static_cast<double>(num_beside);
  std::string inner = y_axis(frame, y) + names_below(frame, chart.labels);
  for (size_t s = chart.series.size(); s-- > 0;) {
    const Series& series = chart.series[s];
    const double shift = chart.is_nested ? 0 : static_cast<double>(s) * width;
    for (size_t i = 0; i < series.y.size(); ++i) {
      const double top = y.px(series.y[i]);
      inner += rectangle(
          fmt::format("class=\"f{}\"", s % kNumColors),
          frame.left + static_cast<double>(i) * room + gap / 2 + shift,
          top,
          width,
          frame.bottom() - top,
          fmt::format("{} {}: {}", chart.labels[i], series.name, tick_text(series.y[i]))
      );
    }
  }
  inner += legend(frame, chart.series);
  return figure(frame, chart.title, chart.x_label, chart.y_label, inner);
}

std::string svg(const HeatMap& chart) {
  const HeatMap map = with_fewer_columns(chart);
  Frame frame;
  frame.width -= kScaleWidth;
  const auto num_rows = static_cast<double>(map.rows.size());
  frame.height = std::clamp(num_rows * 18, 100.0, std::max(260.0, num_rows * 3));
  const auto num_columns = static_cast<double>(std::max<size_t>(map.columns.size(), 1));
  if (frame.width / num_columns > 3) {  // whole pixels leave no seams
    frame.width = std::floor(frame.width / num_columns) * num_columns;
  }
  double high = map.high;
  if (high == 0 && !map.values.empty()) {
    high = *std::max_element(map.values.begin(), map.values.end());
  }
  const std::string inner = cells(map, frame, high) + row_names(map, frame) +
                            names_below(frame, map.columns) + color_scale(map, frame, high);
  return figure(frame, map.title, map.x_label, map.y_label, inner);
}

std::string svg(const LaneChart& chart) {
  Frame frame;
  frame.height = static_cast<double>(chart.lanes.size()) * (kLaneHeight + kLaneGap);
  // Colours come again after the last one, and the line is full.
  frame.has_legend = chart.groups.size() > 1 && chart.groups.size() <= kNumColors;
  double end = 0;
  for (const LaneRow& lane : chart.lanes) {
    for (const LaneBar& bar : lane.bars) {
      end = std::max(end, bar.end);
    }
  }
  const Scale scale = {0, end > 0 ? end : 1, frame.left, frame.right()};
  std::string inner = x_axis(frame, scale, true);
  double y = frame.top + kLaneGap / 2;
  for (const LaneRow& lane : chart.lanes) {
    inner += svg_text(frame.left - 6, y + kLaneHeight / 2 + 4, lane.name, kEnd, "");
    for (const LaneBar& bar : lane.bars) {
      const double left = scale.px(bar.begin);
      inner += rectangle(
          fmt::format("class=\"f{}\"", bar.group % kNumColors),
          left,
          y,
          std::max(scale.px(bar.end) - left, kLeastWidth),
          kLaneHeight,
          fmt::format("{}: {:.3f} to {:.3f}", bar.name, bar.begin, bar.end)
      );
    }
    y += kLaneHeight + kLaneGap;
  }
  inner += legend(frame, chart.groups);
  return figure(frame, chart.title, chart.x_label, "", inner);
}

}  // namespace weft::program
