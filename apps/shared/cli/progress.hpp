// SPDX-License-Identifier: Apache-2.0
// How far a long piece of work is, on stderr: a bar on a terminal once it has run for two seconds,
// a plain line now and then elsewhere, nothing for short work.
#pragma once

#include <string>

#include "core/clock.hpp"

namespace weft::program {

class Progress {
 public:
  // A disabled one (ranks other than 0) says nothing.
  explicit Progress(std::string label, bool is_enabled = true);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  // `fraction` of the work is done, 0 to 1; `note` is shown after it. Cheap: redraws at most ten
  // times a second.
  void update(double fraction, const std::string& note = {});
  void clear();  // takes the bar off the screen, so that other text can follow

 private:
  std::string label_;
  bool is_enabled_;
  bool is_terminal_;
  bool is_drawn_ = false;
  Clock::time_point start_;
  Clock::time_point last_;
};

}  // namespace weft::program
