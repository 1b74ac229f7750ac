// SPDX-License-Identifier: Apache-2.0
// How long a layer takes, forward and backward, as routed, with replicas of popular experts
// (plan/balance/balance.hpp), and if all ranks were equally busy. The exchange is replayed as
// always, of physical experts; products take their operations, weights their bytes.
//
// Assumptions: a rank multiplies the rows of its own experts first, and the weights of its replicas
// come meanwhile; they come once more for the backward pass, since layers share the room for
// replicas. Gradients of replicas go back in fp32 beside the backward pass of what is not expert in
// the layer. Only what is left over of both makes the layer longer.
#pragma once

#include <cstdint>
#include <span>

#include "simulate/model.hpp"
#include "simulate/traffic.hpp"

namespace weft::sim {

struct StepShape {
  int replicas = 0;         // most on each rank
  int64_t hidden = 2048;    // elements of a row
  int64_t width = 768;      // of an expert: three matrices [hidden, width] in bf16
  double token_mflop = 71;  // of a token forward in the layer, but for experts
  double tflops = 600;      // of a rank's products, per second
  double plan_us = 60;      // of a plan with replicas, beyond the plan

  [[nodiscard]] double expert_bytes() const {
    return 3 * 2 * static_cast<double>(hidden) * static_cast<double>(width);
  }
  // Forward, of one row.
  [[nodiscard]] double row_flop() const { return expert_bytes(); }
};

// Times of the rank that is busiest with each, in microseconds.
struct StepTimes {
  double busiest_of_mean = 1;  // rows
  int copies = 0;              // replicas that have rows
  double exchange_us = 0;      // plan, two dispatches and two combines
  double products_us = 0;      // of experts, forward and backward
  double rest_us = 0;          // of the layer, forward and backward
  double weights_us = 0;       // weights to replicas twice, gradients back once, if alone
  double exposed_us = 0;       // of it, what the rest does not hide

  [[nodiscard]] double us() const { return exchange_us + products_us + rest_us + exposed_us; }
  [[nodiscard]] double us_if_not_hidden() const { return us() - exposed_us + weights_us; }
};

struct BalancedStep {
  int num_ranks = 0;
  StepTimes routed;
  StepTimes balanced;
  StepTimes even;  // `even_routes`, and exactly as many rows on each rank
};

// `routes` and `even_routes` by rank, as for simulate(). Throws what simulate() throws.
[[nodiscard]] BalancedStep simulate_step(
    const Scenario& scenario,
    const Model& model,
    std::span<const RouteTable> routes,
    std::span<const RouteTable> even_routes,
    const StepShape& shape
);

}  // namespace weft::sim
