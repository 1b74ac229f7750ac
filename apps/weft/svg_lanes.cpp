// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "html.hpp"
#include "svg_axes.hpp"

namespace weft::program {
namespace {

constexpr double kLaneHeight = 44;
constexpr double kLaneGap = 14;
constexpr double kLeastWidth = 0.5;  // pixels: shorter work is still seen

std::string time_axis(const Frame& frame, const Scale& scale) {
  std::string out;
  for (const double tick : round_ticks(scale.low, scale.high, 8)) {
    const double x = scale.px(tick);
    out += fmt::format(
        "<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>\n",
        x,
        frame.top,
        frame.bottom()
    );
    out += svg_text(x, frame.bottom() + 17, tick_text(tick), Anchor::kMiddle, "soft");
  }
  return out;
}

std::string bar(const LaneBar& bar, const Scale& scale, double y) {
  const double left = scale.px(bar.begin);
  return fmt::format(
      "<rect class=\"f{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"><title>{}: "
      "{:.3f} to {:.3f}</title></rect>\n",
      bar.group % kNumColors,
      left,
      y,
      std::max(scale.px(bar.end) - left, kLeastWidth),
      kLaneHeight,
      html_escape(bar.name),
      bar.begin,
      bar.end
  );
}

}  // namespace

std::string svg(const LaneChart& chart) {
  const auto num_lanes = static_cast<double>(chart.lanes.size());
  Frame frame;
  frame.height = num_lanes * (kLaneHeight + kLaneGap);
  // Colours come again after the last one, and the line is full.
  frame.has_legend = chart.groups.size() > 1 && chart.groups.size() <= kNumColors;
  double end = 0;
  for (const LaneRow& lane : chart.lanes) {
    for (const LaneBar& bar : lane.bars) {
      end = std::max(end, bar.end);
    }
  }
  const Scale scale = {0, end > 0 ? end : 1, frame.left, frame.right()};
  std::string inner = time_axis(frame, scale);
  double y = frame.top + kLaneGap / 2;
  for (const LaneRow& lane : chart.lanes) {
    inner += svg_text(frame.left - 6, y + kLaneHeight / 2 + 4, lane.name, Anchor::kEnd);
    for (const LaneBar& each : lane.bars) {
      inner += bar(each, scale, y);
    }
    y += kLaneHeight + kLaneGap;
  }
  std::vector<Series> groups;
  for (const std::string& name : chart.groups) {
    groups.push_back({name, {}, {}});
  }
  inner += legend(frame, groups);
  return svg_figure(frame, {chart.title, chart.x_label, ""}, inner);
}

}  // namespace weft::program
