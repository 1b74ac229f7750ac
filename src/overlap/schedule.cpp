// SPDX-License-Identifier: Apache-2.0
#include "overlap/schedule.hpp"

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace weft::overlap {
namespace {

void check_range(const Step& step, const std::vector<int>& list, size_t end, const char* what) {
  for (const int idx : list) {
    WEFT_CHECK_ARG(
        Context{},
        idx >= 0 && static_cast<size_t>(idx) < end,
        "schedule: {} names {} {} (there are {} so far)",
        step.name,
        what,
        idx,
        end
    );
  }
}

}  // namespace

int Schedule::add_value(std::string name, Work release) {
  values_.push_back({std::move(name), std::move(release)});
  last_user_.push_back({-1, -1});
  return static_cast<int>(values_.size()) - 1;
}

void Schedule::wait_for_users(Step& step, int value) const {
  for (const int user : last_user_[static_cast<size_t>(value)]) {
    if (user >= 0 && std::find(step.waits.begin(), step.waits.end(), user) == step.waits.end()) {
      step.waits.push_back(user);
    }
  }
}

int Schedule::add_step(Step step) {
  check_range(step, step.waits, steps_.size(), "step");
  for (const auto* list : {&step.reads, &step.writes, &step.frees}) {
    check_range(step, *list, values_.size(), "value");
  }
  for (const int value : step.frees) {
    wait_for_users(step, value);
  }
  const int idx = static_cast<int>(steps_.size());
  for (const auto* list : {&step.reads, &step.writes}) {
    for (const int value : *list) {
      last_user_[static_cast<size_t>(value)][lane_idx(step.lane)] = idx;
    }
  }
  steps_.push_back(std::move(step));
  return idx;
}

int Schedule::add_step_after(Step step, const Event& event) {
  if (event.is_recorded()) {
    step.waits.push_back(event.step());
  }
  return add_step(std::move(step));
}

int Schedule::add_step_on(Step step, Event& event) {
  const int idx = add_step_after(std::move(step), event);
  event.record(idx);
  return idx;
}

}  // namespace weft::overlap
