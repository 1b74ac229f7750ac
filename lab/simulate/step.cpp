// SPDX-License-Identifier: Apache-2.0
#include "simulate/step.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "plan/balance/balance.hpp"
#include "simulate/simulate.hpp"

namespace weft::sim {
namespace {

constexpr int kPasses = 3;  // backward takes two products for each of forward

Balance plan(const Scenario& scenario, std::span<const RouteTable> routes, int replicas) {
  std::vector<int32_t> counts;
  for (const RouteTable& table : routes) {
    const RankCounts one = count_routes(table, scenario.num_experts, scenario.num_ranks, {});
    counts.insert(counts.end(), one.routes.begin(), one.routes.end());
  }
  BalanceOptions options;
  options.replicas = replicas;
  for (int rank = 0; rank < scenario.num_ranks; ++rank) {
    options.domain_of.push_back(scenario.domain_of(rank));
  }
  return plan_balance(counts, scenario.num_ranks, options);
}

double products_us(const StepShape& shape, double rows) {
  return rows * shape.row_flop() / (shape.tflops * 1e6);
}

// Time that the weights of replicas take on the way, and the fewest own rows of a rank that waits
// for some.
struct WeightTraffic {
  double us = 0;  // of the rank that sends or takes most
  int64_t rows_meanwhile = 0;
  int copies = 0;
};

WeightTraffic weight_traffic(
    const Scenario& scenario, const Model& model, const StepShape& shape, const Placement& placement
) {
  const PhysicalExperts& physical = placement.shape;
  const auto ranks = static_cast<size_t>(scenario.num_ranks);
  // Experts over links and cards, out and in.
  std::vector<double> out_us(ranks, 0.0);
  std::vector<double> in_us(ranks, 0.0);
  std::vector<int64_t> own_rows(ranks, 0);
  std::vector<bool> waits(ranks, false);
  WeightTraffic traffic;
  for (int place = 0; place < physical.count(); ++place) {
    const int32_t expert = placement.expert[static_cast<size_t>(place)];
    const int to = physical.rank_of(place);
    const int from = expert < 0 ? to : physical.owner_of(expert);
    if (from == to) {
      own_rows[static_cast<size_t>(to)] += placement.rows[static_cast<size_t>(place)];
      continue;
    }
    const bool is_near = scenario.domain_of(from) == scenario.domain_of(to);
    const double us = shape.expert_bytes() / (is_near ? model.link_gbps : model.card_gbps) / 1e3;
    out_us[static_cast<size_t>(from)] += us;
    in_us[static_cast<size_t>(to)] += us;
    waits[static_cast<size_t>(to)] = true;
    ++traffic.copies;
  }
  traffic.us = std::max(std::ranges::max(out_us), std::ranges::max(in_us));
  int64_t meanwhile = std::numeric_limits<int64_t>::max();
  for (size_t rank = 0; rank < ranks; ++rank) {
    meanwhile = waits[rank] ? std::min(meanwhile, own_rows[rank]) : meanwhile;
  }
  traffic.rows_meanwhile = traffic.copies > 0 ? meanwhile : 0;
  return traffic;
}

double exchange_us(
    const Scenario& scenario, const Model& model, std::span<const RouteTable> routes
) {
  const Simulation one = simulate(scenario, model, routes);
  return one.control.plan_us() + 2 * (one.dispatch_us + one.combine_us);
}

// With `balance` planned already: the exchange is of physical experts.
StepTimes times_of(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    const StepShape& shape,
    const Balance& balance
) {
  Scenario physical = scenario;
  physical.num_experts = balance.placement.shape.count();
  std::vector<RouteTable> assigned(routes.begin(), routes.end());
  int64_t num_routes = 0;
  for (size_t rank = 0; rank < assigned.size(); ++rank) {
    assigned[rank].expert = assign_routes(balance, static_cast<int>(rank), routes[rank].expert);
  }
  for (const int64_t rows : balance.placement.rows) {
    num_routes += rows;
  }
  const double mean = static_cast<double>(num_routes) / scenario.num_ranks;
  const auto busiest = static_cast<double>(balance.placement.busiest());
  const WeightTraffic weights = weight_traffic(scenario, model, shape, balance.placement);
  const double rest_us =
      static_cast<double>(scenario.max_tokens) * shape.token_mflop / shape.tflops;
  const double meanwhile_us = products_us(shape, static_cast<double>(weights.rows_meanwhile));

  StepTimes times;
  times.busiest_of_mean = mean > 0 ? busiest / mean : 1;
  times.copies = weights.copies;
  times.exchange_us = exchange_us(physical, model, assigned);
  times.products_us = kPasses * products_us(shape, busiest);
  times.rest_us = kPasses * rest_us;
  const double gradients_us = 2 * weights.us;  // of fp32, as against weights of bf16
  times.weights_us = 2 * weights.us + gradients_us;
  times.exposed_us = std::max(0.0, weights.us - meanwhile_us) +
                     std::max(0.0, weights.us - (kPasses - 1) * meanwhile_us) +
                     std::max(0.0, gradients_us - (kPasses - 1) * rest_us);
  return times;
}

}  // namespace

BalancedStep simulate_step(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    std::span<const RouteTable> even_routes,
    const StepShape& shape
) {
  const auto times = [&](std::span<const RouteTable> of, int replicas) {
    return times_of(scenario, model, of, shape, plan(scenario, of, replicas));
  };
  BalancedStep step;
  step.num_ranks = scenario.num_ranks;
  step.routed = times(routes, 0);
  step.balanced = times(routes, shape.replicas);
  step.balanced.exchange_us += shape.plan_us;
  step.even = times(even_routes, 0);
  step.even.products_us /= step.even.busiest_of_mean;
  step.even.busiest_of_mean = 1;
  return step;
}

}  // namespace weft::sim
