// SPDX-License-Identifier: Apache-2.0
// Steps in the order they are issued, the steps they wait for, and the values they pass on. Knows
// nothing of layers, threads or devices.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "overlap/lane.hpp"

namespace weft::overlap {

// Something a step makes and others read. The engine never looks into it: it says when it may go.
struct Value {
  std::string name;
  Work release = {};  // called at most once in a run; may be empty
};

// Steps and values are named by their index in the schedule.
struct Step {
  std::string name;
  Lane lane = Lane::kCompute;
  int micro_batch = -1;
  Work work = {};  // empty: the step only waits and frees
  std::vector<int> waits = {};
  std::vector<int> reads = {};
  std::vector<int> writes = {};
  std::vector<int> frees = {};  // released on this lane when the work is done
};

// The point a micro-batch has reached: its next step waits for it and moves it on.
class Event {
 public:
  [[nodiscard]] bool is_recorded() const { return step_ >= 0; }
  [[nodiscard]] int step() const { return step_; }
  void record(int step) { step_ = step; }

 private:
  int step_ = -1;
};

class Schedule {
 public:
  // A value that no step writes is the caller's: it exists before the run.
  int add_value(std::string name, Work release = {});

  // Issues a step. It may wait only for earlier ones, so that lanes can never wait for each other
  // in a circle. A step that frees a value also waits for whoever reads it so far.
  int add_step(Step step);
  // Issues a step that waits for the event.
  int add_step_after(Step step, const Event& event);
  // The same, and moves the event to it.
  int add_step_on(Step step, Event& event);

  [[nodiscard]] const std::vector<Step>& steps() const { return steps_; }
  [[nodiscard]] const std::vector<Value>& values() const { return values_; }

 private:
  void wait_for_users(Step& step, int value) const;

  std::vector<Step> steps_;
  std::vector<Value> values_;
  // By value and lane, the last step that reads or writes it; -1: none. Earlier ones of that lane
  // come before it anyway.
  std::vector<std::array<int, kNumLanes>> last_user_;
};

}  // namespace weft::overlap
