// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "train/command/report.hpp"
#include "train/lanes/trace.hpp"

namespace weft::program {
namespace {

constexpr size_t kMostPoints = 2000;  // then every two become one
constexpr size_t kRecentSteps = 10;

// Adds `point` to the neighbours that `sum` stands for.
void merge_into(StepPoint& sum, const StepPoint& point) {
  const auto old_steps = static_cast<double>(sum.num_steps);
  const auto new_steps = static_cast<double>(point.num_steps);
  const auto mean = [&](double a, double b) {
    return (a * old_steps + b * new_steps) / (old_steps + new_steps);
  };
  sum.step = point.step;
  sum.loss = mean(sum.loss, point.loss);
  sum.balance_loss = mean(sum.balance_loss, point.balance_loss);
  sum.seconds = mean(sum.seconds, point.seconds);
  for (size_t i = 0; i < sum.routes.size(); ++i) {
    sum.routes[i] = mean(sum.routes[i], point.routes[i]);
  }
  sum.num_steps += point.num_steps;
}

LaneSeconds lane_seconds(const overlap::Trace& trace) {
  const overlap::LaneTimes times = overlap::lane_times(trace);
  const auto seconds = [](int64_t ns) { return static_cast<double>(ns) / 1e9; };
  return {
      seconds(times.wall_ns),
      seconds(times.busy_ns[overlap::lane_idx(overlap::Lane::kCompute)]),
      seconds(times.busy_ns[overlap::lane_idx(overlap::Lane::kExchange)]),
      seconds(times.exposed_ns)};
}

}  // namespace

RankStep RankStep::from(const moe::StepReport& report) {
  RankStep step;
  step.phase_seconds = report.phase_seconds;
  step.seconds = report.seconds;
  step.lanes = lane_seconds(report.trace);
  step.num_tokens = report.num_tokens;
  step.dispatch = report.dispatch;
  step.combine = report.combine;
  return step;
}

void TrainRecord::add(const moe::StepReport& report, std::span<const RankStep> ranks) {
  ++num_steps_;
  last_step_ = report.step;
  num_tokens_ += report.global_tokens;
  StepPoint point;
  point.step = static_cast<double>(report.step);
  point.loss = report.loss;
  point.balance_loss = report.balance_loss;
  point.routes.assign(report.routes.begin(), report.routes.end());
  const double part = 1.0 / static_cast<double>(ranks.size());
  wait_seconds_ = 0;
  for (const RankStep& rank : ranks) {
    wait_seconds_ += rank.wait_seconds * part;
    point.seconds = std::max(point.seconds, rank.seconds);
    rank_seconds_ += rank.seconds * part;
    for (size_t i = 0; i < moe::kNumPhases; ++i) {
      phase_seconds_[i] += rank.phase_seconds[i] * part;
    }
    lanes_.wall += rank.lanes.wall * part;
    lanes_.compute += rank.lanes.compute * part;
    lanes_.exchange += rank.lanes.exchange * part;
    lanes_.exposed += rank.lanes.exposed * part;
  }
  trace_ = report.trace;
  seconds_ += point.seconds;
  add_moved(dispatch_, ranks, &RankStep::dispatch, moe::Phase::kDispatch);
  add_moved(combine_, ranks, &RankStep::combine, moe::Phase::kCombine);

  recent_.push_back(report.loss);
  if (recent_.size() > kRecentSteps) {
    recent_.erase(recent_.begin());
  }
  add_point(std::move(point));
}

void TrainRecord::add_moved(
    MovedBytes& sum,
    std::span<const RankStep> ranks,
    moe::Traffic RankStep::*traffic,
    moe::Phase phase
) const {
  const auto time_of = [&](const RankStep& rank) {
    return rank.phase_seconds[static_cast<size_t>(phase)];
  };
  // Of a token in one call: a call moves the tokens of one micro-batch.
  const double token_bytes =
      static_cast<double>(row_bytes_) / static_cast<double>(num_micro_batches_);
  for (const RankStep& rank : ranks) {
    const moe::Traffic& moved = rank.*traffic;
    sum.wire += static_cast<double>(moved.wire_bytes);
    sum.logical += static_cast<double>(moved.logical_bytes);
    sum.tokens += static_cast<double>(moved.calls * rank.num_tokens) * token_bytes;
  }
  sum.calls += static_cast<double>((ranks.front().*traffic).calls);
  const auto [fastest, slowest] = std::ranges::minmax(ranks, {}, time_of);
  sum.fastest_seconds += time_of(fastest);
  sum.seconds += time_of(slowest);
}

void TrainRecord::add_point(StepPoint point) {
  if (!points_.empty() && points_.back().num_steps < steps_per_point_) {
    merge_into(points_.back(), point);
  } else {
    points_.push_back(std::move(point));
  }
  if (points_.size() < kMostPoints || points_.back().num_steps < steps_per_point_) {
    return;
  }
  for (size_t i = 0; i < points_.size() / 2; ++i) {
    points_[i] = points_[2 * i];
    merge_into(points_[i], points_[2 * i + 1]);
  }
  points_.resize(points_.size() / 2);
  steps_per_point_ *= 2;
}

double TrainRecord::recent_loss() const {
  if (recent_.empty()) {
    return NAN;
  }
  return std::accumulate(recent_.begin(), recent_.end(), 0.0) / static_cast<double>(recent_.size());
}

std::vector<int64_t> TrainRecord::recent_routes(int block) const {
  const auto num_experts = static_cast<size_t>(model_.num_experts);
  const size_t first = static_cast<size_t>(block) * num_experts;
  const size_t num_points = (points_.size() + 9) / 10;
  std::vector<int64_t> routes(num_experts, 0);
  for (size_t e = 0; e < num_experts && num_points > 0; ++e) {
    double sum = 0;
    for (size_t p = points_.size() - num_points; p < points_.size(); ++p) {
      sum += points_[p].routes[first + e];
    }
    routes[e] = std::llround(sum / static_cast<double>(num_points));
  }
  return routes;
}

}  // namespace weft::program
