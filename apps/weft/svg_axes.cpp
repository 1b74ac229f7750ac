// SPDX-License-Identifier: Apache-2.0
#include "svg_axes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "html.hpp"

namespace weft::program {
namespace {

constexpr double kAxisRoom = 44;    // below the plot: numbers and label
constexpr double kLegendRoom = 22;  // below that

}  // namespace

double Scale::px(double value) const {
  const auto place = [&](double v) { return is_log ? std::log(v) : v; };
  const double span = place(high) - place(low);
  const double part = span > 0 ? (place(value) - place(low)) / span : 0.5;
  return first_px + part * (last_px - first_px);
}

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

std::string tick_text(double value) {
  const double size = std::abs(value);
  if (size >= 1e9) {
    return fmt::format("{:.4g}G", value / 1e9);
  }
  if (size >= 1e6) {
    return fmt::format("{:.4g}M", value / 1e6);
  }
  if (size >= 1e4) {
    return fmt::format("{:.4g}k", value / 1e3);
  }
  return fmt::format("{:.4g}", size < 1e-12 ? 0.0 : value);
}

std::string svg_text(
    double x, double y, std::string_view text, Anchor anchor, std::string_view css_class
) {
  static constexpr const char* kNames[] = {"start", "middle", "end"};
  return fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>\n",
      x,
      y,
      kNames[static_cast<size_t>(anchor)],
      css_class.empty() ? "" : fmt::format(" class=\"{}\"", css_class),
      html_escape(text)
  );
}

std::string svg_figure(const Frame& frame, const Labels& labels, const std::string& inner) {
  const double height = frame.bottom() + kAxisRoom + (frame.has_legend ? kLegendRoom : 0);
  const double middle = frame.top + frame.height / 2;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n",
      kCanvasWidth,
      height,
      html_escape(labels.title)
  );
  out += svg_text(frame.left, 18, labels.title, Anchor::kStart, "title");
  out += svg_text(
      frame.left + frame.width / 2, frame.bottom() + 36, labels.x, Anchor::kMiddle, "soft"
  );
  out += fmt::format(
      "<text x=\"{0:.1f}\" y=\"{1:.1f}\" text-anchor=\"middle\" class=\"soft\" "
      "transform=\"rotate(-90 {0:.1f} {1:.1f})\">{2}</text>\n",
      14.0,
      middle,
      html_escape(labels.y)
  );
  return out + inner + "</svg>\n";
}

std::string y_axis(const Frame& frame, const Scale& scale) {
  std::string out;
  for (const double tick : round_ticks(scale.low, scale.high, 5)) {
    const double y = scale.px(tick);
    out += fmt::format(
        "<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
        frame.left,
        y,
        frame.right(),
        y
    );
    out += svg_text(frame.left - 8, y + 4, tick_text(tick), Anchor::kEnd, "soft");
  }
  return out;
}

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

std::string legend(const Frame& frame, const std::vector<Series>& series) {
  if (!frame.has_legend) {
    return {};
  }
  std::string out;
  double x = frame.left;
  for (size_t i = 0; i < series.size(); ++i) {
    const double y = frame.bottom() + 52;
    out += fmt::format(
        "<rect class=\"f{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"8\" rx=\"2\"/>\n",
        i % kNumColors,
        x,
        y
    );
    out += svg_text(x + 17, y + 8, series[i].name, Anchor::kStart);
    x += 34 + 6.6 * static_cast<double>(series[i].name.size());
  }
  return out;
}

}  // namespace weft::program
