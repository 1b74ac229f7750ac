// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "html.hpp"
#include "svg_axes.hpp"

namespace weft::program {
namespace {

constexpr double kLabelWidth = 6.6;  // of one character, about

// Names under the groups; every n-th where they would touch.
std::string group_labels(const Frame& frame, const std::vector<std::string>& labels) {
  size_t longest = 1;
  for (const auto& label : labels) {
    longest = std::max(longest, label.size());
  }
  const double room = frame.width / static_cast<double>(labels.size());
  const double wanted = kLabelWidth * static_cast<double>(longest + 1);
  const size_t every = label_stride(labels.size(), wanted, frame.width);
  std::string out;
  for (size_t i = 0; i < labels.size(); i += every) {
    const double x = frame.left + (static_cast<double>(i) + 0.5) * room;
    out += svg_text(x, frame.bottom() + 17, labels[i], Anchor::kMiddle, "soft");
  }
  return out;
}

}  // namespace

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
  std::string inner = y_axis(frame, y) + group_labels(frame, chart.labels);
  for (size_t s = chart.series.size(); s-- > 0;) {
    for (size_t i = 0; i < chart.series[s].y.size(); ++i) {
      const double value = chart.series[s].y[i];
      const double shift = chart.is_nested ? 0 : static_cast<double>(s) * width;
      inner += fmt::format(
          "<rect class=\"f{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"><title>"
          "{} {}: {}</title></rect>\n",
          s % kNumColors,
          frame.left + static_cast<double>(i) * room + gap / 2 + shift,
          y.px(value),
          width,
          frame.bottom() - y.px(value),
          html_escape(chart.labels[i]),
          html_escape(chart.series[s].name),
          tick_text(value)
      );
    }
  }
  inner += legend(frame, chart.series);
  return svg_figure(frame, {chart.title, chart.x_label, chart.y_label}, inner);
}

}  // namespace weft::program
