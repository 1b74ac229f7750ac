// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numeric>

#include "train/command/command.hpp"

namespace weft::program {
namespace {

constexpr size_t kMostPoints = 2000;  // then every two become one
constexpr size_t kRecentSteps = 10;

void add_moved(
    MovedBytes& sum,
    std::span<const RankStep> ranks,
    moe::Traffic moe::RankReport::*traffic,
    moe::Phase phase
) {
  const auto time_of = [&](const RankStep& rank) {
    return rank.phase_seconds[static_cast<size_t>(phase)];
  };
  for (const RankStep& rank : ranks) {
    const moe::Traffic& moved = rank.*traffic;
    sum.wire += static_cast<double>(moved.wire_bytes);
    sum.logical += static_cast<double>(moved.logical_bytes);
  }
  sum.calls += static_cast<double>((ranks.front().*traffic).calls);
  const auto [fastest, slowest] = std::ranges::minmax(ranks, {}, time_of);
  sum.fastest_seconds += time_of(fastest);
  sum.seconds += time_of(slowest);
}

void add_point(TrainRecord& record, StepPoint point) {
  std::vector<StepPoint>& points = record.points;
  if (!points.empty() && points.back().num_steps < record.steps_per_point) {
    points.back().merge(point);
  } else {
    points.push_back(std::move(point));
  }
  if (points.size() < kMostPoints || points.back().num_steps < record.steps_per_point) {
    return;
  }
  for (size_t i = 0; i < points.size() / 2; ++i) {
    points[i] = points[2 * i];
    points[i].merge(points[2 * i + 1]);
  }
  points.resize(points.size() / 2);
  record.steps_per_point *= 2;
}

}  // namespace

void StepPoint::merge(const StepPoint& next) {
  const auto add = [&, sum_steps = static_cast<double>(num_steps)](double& sum, double value) {
    const auto steps = static_cast<double>(next.num_steps);
    sum = (sum * sum_steps + value * steps) / (sum_steps + steps);
  };
  step = next.step;
  add(loss, next.loss);
  add(balance_loss, next.balance_loss);
  add(seconds, next.seconds);
  for (size_t i = 0; i < routes.size(); ++i) {
    add(routes[i], next.routes[i]);
  }
  num_steps += next.num_steps;
}

void TrainRecord::add(const moe::StepReport& report, std::span<const RankStep> ranks) {
  ++num_steps;
  last_step = report.step;
  num_tokens += report.global_tokens;
  busiest += report.busiest;
  unbalanced += report.unbalanced;
  mean_load += report.mean_load;
  StepPoint point;
  point.step = static_cast<double>(report.step);
  point.loss = report.loss;
  point.balance_loss = report.balance_loss;
  point.routes.assign(report.routes.begin(), report.routes.end());
  const double part = 1.0 / static_cast<double>(ranks.size());
  wait_seconds = 0;
  for (const RankStep& rank : ranks) {
    wait_seconds += rank.wait_seconds * part;
    point.seconds = std::max(point.seconds, rank.seconds);
    rank_seconds += rank.seconds * part;
    for (size_t i = 0; i < moe::kNumPhases; ++i) {
      phase_seconds[i] += rank.phase_seconds[i] * part;
    }
    const auto share = [&](int64_t ns) { return static_cast<double>(ns) / 1e9 * part; };
    lanes.wall += share(rank.lanes.wall_ns);
    lanes.compute += share(rank.lanes.busy_ns[0]);
    lanes.exchange += share(rank.lanes.busy_ns[1]);
    lanes.exposed += share(rank.lanes.exposed_ns);
  }
  trace = report.trace;
  seconds += point.seconds;
  add_moved(dispatch, ranks, &RankStep::dispatch, moe::Phase::kDispatch);
  add_moved(combine, ranks, &RankStep::combine, moe::Phase::kCombine);

  recent_losses.push_back(report.loss);
  if (recent_losses.size() > kRecentSteps) {
    recent_losses.erase(recent_losses.begin());
  }
  add_point(*this, std::move(point));
}

double TrainRecord::recent_loss() const {
  const double sum = std::accumulate(recent_losses.begin(), recent_losses.end(), 0.0);
  return recent_losses.empty() ? NAN : sum / static_cast<double>(recent_losses.size());
}

std::vector<int64_t> TrainRecord::recent_routes(int block) const {
  const auto num_experts = static_cast<size_t>(model.num_experts);
  const size_t first = static_cast<size_t>(block) * num_experts;
  const size_t num_points = (points.size() + 9) / 10;
  std::vector<int64_t> routes(num_experts, 0);
  for (size_t e = 0; e < num_experts && num_points > 0; ++e) {
    double sum = 0;
    for (size_t p = points.size() - num_points; p < points.size(); ++p) {
      sum += points[p].routes[first + e];
    }
    routes[e] = std::llround(sum / static_cast<double>(num_points));
  }
  return routes;
}

}  // namespace weft::program
