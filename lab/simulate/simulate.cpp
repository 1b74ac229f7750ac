// SPDX-License-Identifier: Apache-2.0
#include "simulate/simulate.hpp"

#include <algorithm>
#include <future>

#include "cpu/protocol/region_map.hpp"

namespace weft::sim {
namespace {

void sum_up(Simulation& simulation) {
  const auto& ranks = simulation.traffic.ranks;
  for (const auto& [name, field] : traffic_fields()) {
    int64_t sum = 0;
    for (const RankTraffic& rank : ranks) {
      sum += rank.*field;
      simulation.most.*field = std::max(simulation.most.*field, rank.*field);
    }
    const auto count = static_cast<int64_t>(ranks.size());
    simulation.mean.*field = (sum + count / 2) / count;
  }
}

int find_busiest(const Scenario& scenario, const Model& model, const Traffic& traffic) {
  const auto load = [&](const RankTraffic& rank) {
    const auto card_bytes =
        static_cast<double>(std::max(rank.card_in, rank.card_out) * scenario.row_bytes);
    return std::max(domain_load_us(scenario, model, rank), card_bytes / model.card_gbps / 1e3);
  };
  const auto found = std::ranges::max_element(traffic.ranks, {}, load);
  return static_cast<int>(found - traffic.ranks.begin());
}

// An upper bound of the parts if every domain is replayed.
int64_t count_parts(const Scenario& scenario, const Traffic& traffic) {
  int64_t parts = 0;
  for (const RankTraffic& rank : traffic.ranks) {
    const int64_t chunks = rank.card_out / kChunkArrivals + scenario.num_domains();
    parts += std::min(rank.card_out_per_rank, chunks * scenario.ranks_per_domain);
    parts += rank.link_out / kChunkArrivals + scenario.ranks_per_domain;
  }
  return parts;
}

}  // namespace

Simulation simulate(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    const std::function<void(double)>& told,
    int64_t most_parts
) {
  Simulation simulation;
  simulation.scenario = scenario;
  simulation.traffic = count_traffic(scenario, static_cast<int64_t>(model.message_rows), routes);
  sum_up(simulation);
  told(0.2);

  const Traffic& traffic = simulation.traffic;
  simulation.busiest_rank = find_busiest(scenario, model, traffic);
  std::vector<bool> is_replayed(
      static_cast<size_t>(scenario.num_domains()), count_parts(scenario, traffic) <= most_parts
  );
  is_replayed[static_cast<size_t>(scenario.domain_of(simulation.busiest_rank))] = true;
  simulation.num_replayed = static_cast<int>(std::ranges::count(is_replayed, true));
  const Schedule schedule = make_schedule(scenario, traffic, routes, std::move(is_replayed));
  told(0.4);
  auto combine = std::async(std::launch::async, [&] {
    return replay_combine(scenario, model, schedule, traffic);
  });
  simulation.dispatch_rows = replay_dispatch(scenario, model, schedule);
  told(0.7);
  simulation.combine_rows = combine.get();
  told(1);

  simulation.memory = memory_of(scenario, traffic, simulation.busiest_rank);
  simulation.control = control_cost(scenario, model, simulation.memory);
  const double before = model.call_us + simulation.control.words_us;
  simulation.dispatch_us = before + simulation.dispatch_rows.us;
  simulation.combine_us = before + simulation.combine_rows.us;
  return simulation;
}

}  // namespace weft::sim
