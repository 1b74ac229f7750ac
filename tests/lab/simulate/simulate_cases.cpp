// SPDX-License-Identifier: Apache-2.0
#include "simulate_cases.hpp"

namespace weft::sim {

Scenario small_scenario() {
  return {
      .num_ranks = 24,
      .ranks_per_domain = 4,
      .num_experts = 48,
      .topk = 4,
      .max_tokens = 200,
      .row_bytes = 256};
}

std::vector<RouteTable> make_routes(const Scenario& scenario, const RoutingChoice& choice) {
  std::vector<RouteTable> routes;
  for (int rank = 0; rank < scenario.num_ranks; ++rank) {
    RandomRouting spec;
    spec.num_tokens = choice.has_uneven_tokens ? scenario.max_tokens * rank / scenario.num_ranks
                                               : scenario.max_tokens;
    spec.num_experts = scenario.num_experts;
    spec.topk = scenario.topk;
    spec.popularity = choice.skew > 0 ? Popularity::kZipf : Popularity::kUniform;
    spec.zipf_exponent = choice.skew;
    spec.hole_fraction = choice.hole_fraction;
    spec.repeat_experts = choice.repeat_experts;
    spec.with_weights = false;
    spec.seed = choice.seed;
    routes.push_back(random_routing(spec, rank));
  }
  return routes;
}

Model plain_model() {
  Model model = h200_model();
  model.name = "plain";
  model.link_gbps = 100;
  model.link_latency_us = 1;
  model.link_signal_us = 0.1;
  model.copy_gbps = 1000;
  model.card_gbps = 10;
  model.card_latency_us = 2;
  model.card_messages = 10;
  model.card_window = 64;
  model.post_us = 0.2;
  model.proxies = 1;
  model.message_rows = 32;
  model.call_us = 5;
  return model;
}

}  // namespace weft::sim
