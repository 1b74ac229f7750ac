// SPDX-License-Identifier: Apache-2.0
#include "overlap/held_values.hpp"

namespace weft::overlap {

HeldValues::HeldValues(const Schedule& schedule)
    : schedule_(schedule), is_held_(schedule.values().size(), 1) {
  for (const Step& step : schedule.steps()) {
    for (const int value : step.writes) {
      is_held_[static_cast<size_t>(value)] = 0;
    }
  }
}

void HeldValues::begin_step(const Step& step) {
  for (const int value : step.writes) {
    is_held_[static_cast<size_t>(value)] = 1;
  }
}

void HeldValues::end_step(const Step& step, const LaneContext& context) {
  for (const int value : step.frees) {
    const auto idx = static_cast<size_t>(value);
    is_held_[idx] = 0;  // first: a release that throws is not called again
    if (const Work& release = schedule_.values()[idx].release) {
      release(context);
    }
  }
}

void HeldValues::release_all(const LaneContext& context) noexcept {
  for (size_t idx = is_held_.size(); idx-- > 0;) {
    const Work& release = schedule_.values()[idx].release;
    if (is_held_[idx] == 0 || !release) {
      continue;
    }
    is_held_[idx] = 0;
    try {
      release(context);
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }
}

}  // namespace weft::overlap
