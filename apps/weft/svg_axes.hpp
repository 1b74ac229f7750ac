// SPDX-License-Identifier: Apache-2.0
// What the charts of svg.hpp share: the canvas, scales, ticks, labels and the legend.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "svg.hpp"

namespace weft::program {

inline constexpr double kCanvasWidth = 760;
inline constexpr size_t kNumColors = 6;  // of html.cpp's style

// A span of values laid along a span of pixels.
struct Scale {
  double low = 0;
  double high = 1;
  double first_px = 0;  // where `low` lies
  double last_px = 1;
  bool is_log = false;

  [[nodiscard]] double px(double value) const;
};

// Round numbers that cover [low, high], about `wanted` of them.
[[nodiscard]] std::vector<double> round_ticks(double low, double high, int wanted);
// Powers of two, or of ten for a wide span.
[[nodiscard]] std::vector<double> log_ticks(double low, double high);
// 0.25, 1200, 64k, 1.5M
[[nodiscard]] std::string tick_text(double value);

enum class Anchor { kStart, kMiddle, kEnd };
[[nodiscard]] std::string svg_text(
    double x,
    double y,
    std::string_view text,
    Anchor anchor = Anchor::kMiddle,
    std::string_view css_class = {}
);

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

struct Labels {
  std::string_view title;
  std::string_view x;
  std::string_view y;
};

// The whole figure: `<svg>` with title and axis labels around `inner`.
[[nodiscard]] std::string svg_figure(
    const Frame& frame, const Labels& labels, const std::string& inner
);
// Grid lines with their numbers on the left.
[[nodiscard]] std::string y_axis(const Frame& frame, const Scale& scale);
// How many of `num_names` names, each `name_px` long, to skip from one shown to the next in
// `room_px`: 1, 2, 5, 10, 20, ...
[[nodiscard]] size_t label_stride(size_t num_names, double name_px, double room_px);
// Names of the series, under the x label.
[[nodiscard]] std::string legend(const Frame& frame, const std::vector<Series>& series);

}  // namespace weft::program
