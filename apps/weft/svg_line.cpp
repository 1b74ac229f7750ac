// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "svg_axes.hpp"

namespace weft::program {
namespace {

constexpr size_t kMarkedPoints = 24;  // a line of at most so many points shows each of them

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

std::string x_axis(const Frame& frame, const Scale& scale) {
  std::string out;
  const auto ticks =
      scale.is_log ? log_ticks(scale.low, scale.high) : round_ticks(scale.low, scale.high, 8);
  for (const double tick : ticks) {
    out += svg_text(scale.px(tick), frame.bottom() + 17, tick_text(tick), Anchor::kMiddle, "soft");
  }
  return out;
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

}  // namespace

std::string svg(const LineChart& chart) {
  Frame frame;
  frame.has_legend = chart.series.size() > 1;
  const Bounds xs = bounds_of(chart.series, &Series::x);
  const Bounds ys = with_room(bounds_of(chart.series, &Series::y), chart.starts_at_zero);
  const Scale x = {xs.low, xs.high, frame.left, frame.right() - 8, chart.is_log_x && xs.low > 0};
  const Scale y = {ys.low, ys.high, frame.bottom(), frame.top};
  std::string inner = y_axis(frame, y) + x_axis(frame, x);
  for (size_t i = 0; i < chart.series.size(); ++i) {
    inner += curve(chart.series[i], i % kNumColors, x, y);
  }
  inner += legend(frame, chart.series);
  return svg_figure(frame, {chart.title, chart.x_label, chart.y_label}, inner);
}

}  // namespace weft::program
