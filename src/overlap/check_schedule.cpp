// SPDX-License-Identifier: Apache-2.0
#include "overlap/check_schedule.hpp"

#include <algorithm>
#include <string_view>

#include "core/check.hpp"

namespace weft::overlap {
namespace {

// By lane, how many of its steps have surely ended.
using Progress = std::array<int, kNumLanes>;

class Checker {
 public:
  explicit Checker(const Schedule& schedule)
      : schedule_(schedule),
        writer_(schedule.values().size(), -1),
        freer_(schedule.values().size(), -1) {}

  void run() {
    order_steps();
    for (size_t idx = 0; idx < steps().size(); ++idx) {
      note_once(static_cast<int>(idx), steps()[idx].writes, writer_, "written");
      note_once(static_cast<int>(idx), steps()[idx].frees, freer_, "freed");
    }
    for (size_t idx = 0; idx < steps().size(); ++idx) {
      for (const int value : steps()[idx].reads) {
        check_read(static_cast<int>(idx), value);
      }
      for (const int value : steps()[idx].writes) {
        check_before_free(static_cast<int>(idx), value, "written");
      }
      for (const int value : steps()[idx].frees) {
        check_after_writer(static_cast<int>(idx), value, "freed");
      }
    }
  }

 private:
  [[nodiscard]] const std::vector<Step>& steps() const { return schedule_.steps(); }
  [[nodiscard]] const std::string& step_name(int step) const {
    return steps()[static_cast<size_t>(step)].name;
  }
  [[nodiscard]] const std::string& value_name(int value) const {
    return schedule_.values()[static_cast<size_t>(value)].name;
  }

  // A step comes after the one before it on its lane, after those it waits for, and after whatever
  // comes before those.
  void order_steps() {
    std::array<Progress, kNumLanes> lane_progress = {};
    for (const Step& step : steps()) {
      Progress& own = lane_progress[lane_idx(step.lane)];
      for (const int wait : step.waits) {
        const Progress& other = ended_[static_cast<size_t>(wait)];
        std::transform(own.begin(), own.end(), other.begin(), own.begin(), [](int a, int b) {
          return std::max(a, b);
        });
      }
      ++own[lane_idx(step.lane)];
      ended_.push_back(own);
    }
  }

  // Whether `first` has ended when `second` begins, on any run.
  [[nodiscard]] bool is_before(int first, int second) const {
    const size_t lane = lane_idx(steps()[static_cast<size_t>(first)].lane);
    const int place = ended_[static_cast<size_t>(first)][lane];
    return first != second && ended_[static_cast<size_t>(second)][lane] >= place;
  }

  void note_once(
      int step, const std::vector<int>& values, std::vector<int>& by_value, std::string_view what
  ) const {
    for (const int value : values) {
      int& noted = by_value[static_cast<size_t>(value)];
      WEFT_CHECK_ARG(
          Context{},
          noted < 0,
          "schedule: {} is {} by {} and again by {}",
          value_name(value),
          what,
          step_name(noted),
          step_name(step)
      );
      noted = step;
    }
  }

  void check_read(int step, int value) const {
    check_after_writer(step, value, "read");
    check_before_free(step, value, "read");
  }

  void check_after_writer(int step, int value, std::string_view what) const {
    const int writer = writer_[static_cast<size_t>(value)];
    WEFT_CHECK_ARG(
        Context{},
        writer < 0 || is_before(writer, step),
        "schedule: {} may be {} by {} before {} has written it",
        value_name(value),
        what,
        step_name(step),
        step_name(writer)
    );
  }

  void check_before_free(int step, int value, std::string_view what) const {
    const int freer = freer_[static_cast<size_t>(value)];
    WEFT_CHECK_ARG(
        Context{},
        freer < 0 || freer == step || is_before(step, freer),
        "schedule: {} may be {} by {} after {} has freed it",
        value_name(value),
        what,
        step_name(step),
        step_name(freer)
    );
  }

  const Schedule& schedule_;
  std::vector<Progress> ended_;
  std::vector<int> writer_;
  std::vector<int> freer_;
};

}  // namespace

void check_schedule(const Schedule& schedule) {
  Checker(schedule).run();
}

}  // namespace weft::overlap
