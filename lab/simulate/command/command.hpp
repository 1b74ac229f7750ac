// SPDX-License-Identifier: Apache-2.0
// `weft-lab simulate`: the command, what simulations say as tables and as JSON, and a model of this
// machine.
#pragma once

#include <nlohmann/json.hpp>

#include <span>
#include <string>
#include <vector>

#include "cli/forward.hpp"
#include "report/table.hpp"
#include "simulate/simulate.hpp"
#include "simulate/step.hpp"

namespace weft::program {

void add_simulate(CLI::App& app);

// The tables that there are, in order: "times", "busy", "bytes", "cpu", "gpu", "messages".
[[nodiscard]] std::vector<std::string> simulation_tables();
// Returns the tables named in `wanted` (empty: all), each with a line for each size.
[[nodiscard]] std::string simulation_text(
    std::span<const sim::Simulation> sizes, std::span<const std::string> wanted
);

// Every number with its meaning and origin, and the plans that it was fitted to.
[[nodiscard]] std::string model_text(const sim::Model& model);

// A layer's time as routed, balanced and even, three lines for each size.
[[nodiscard]] std::string steps_text(std::span<const sim::BalancedStep> steps);

// `steps`: of each size, or none.
[[nodiscard]] nlohmann::ordered_json simulation_json(
    std::span<const sim::Simulation> sizes,
    std::span<const sim::BalancedStep> steps,
    const sim::Model& model
);

// Returns the most ranks that fit each resource's bound, the rest of the scenario as it is.
[[nodiscard]] Table ends_table(
    const sim::Scenario& scenario, const sim::Model& model, int64_t budget_bytes
);

// A model of this machine, by measuring what it can show of itself: copies, plans, messages over
// shared memory and over loopback; what needs a network stays as assumed. Writes the model to
// `path` and returns it. Throws Error (kFile).
[[nodiscard]] sim::Model calibrate(const std::string& path);

}  // namespace weft::program
