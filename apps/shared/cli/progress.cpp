// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sys/ioctl.h>
#include <unistd.h>

namespace weft::program {
namespace {

constexpr double kSilentSeconds = 2.0;
constexpr double kRedrawSeconds = 0.1;
constexpr double kLineSeconds = 10.0;
constexpr int kBarWidth = 24;

size_t terminal_columns() {
  winsize size = {};
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string text_of(double fraction, const std::string& note, double elapsed) {
  std::string out = fmt::format("{:3.0f} %", fraction * 100);
  if (fraction > 0.02 && fraction < 1) {
    const double left = std::ceil(elapsed * (1 - fraction) / fraction);
    out += left < 600 ? fmt::format("  {:.0f} s left", left)
                      : fmt::format("  {:.0f} min left", left / 60);
  }
  return note.empty() ? out : out + "  " + note;
}

}  // namespace

Progress::Progress(std::string label, bool is_enabled)
    : label_(std::move(label)),
      is_enabled_(is_enabled),
      is_terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {}

void Progress::clear() {
  if (is_drawn_) {
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
    is_drawn_ = false;
  }
}

void Progress::update(double fraction, const std::string& note) {
  const auto now = Clock::now();
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double since_last = std::chrono::duration<double>(now - last_).count();
  if (!is_enabled_ || elapsed < kSilentSeconds ||
      since_last < (is_terminal_ ? kRedrawSeconds : kLineSeconds)) {
    return;
  }
  last_ = now;
  fraction = std::clamp(fraction, 0.0, 1.0);
  const std::string text = text_of(fraction, note, elapsed);
  if (!is_terminal_) {
    fmt::print(stderr, "{}: {}\n", label_, text);
    return;
  }
  const auto filled = static_cast<size_t>(fraction * kBarWidth);
  std::string line = fmt::format(
      "{} [{}{}] {}", label_, std::string(filled, '#'), std::string(kBarWidth - filled, '.'), text
  );
  line.resize(std::min(line.size(), terminal_columns() - 1));
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
  is_drawn_ = true;
}

}  // namespace weft::program
