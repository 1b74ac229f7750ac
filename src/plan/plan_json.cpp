// SPDX-License-Identifier: Apache-2.0
// A plan as JSON. What follows from the rest (token lists) is made anew on loading.
#include <nlohmann/json.hpp>

#include "core/atomic_file.hpp"
#include "plan/plan_data.hpp"
#include "plan/plan_from_json.hpp"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

Json shape_to_json(const PlanShape& shape) {
  const PlanOptions& options = shape.options;
  return {
      {"rank", shape.rank},
      {"num_ranks", shape.num_ranks},
      {"num_experts", shape.num_experts},
      {"topk", shape.topk},
      {"num_tokens", shape.num_tokens},
      {"from_map", shape.from_map},
      {"has_weights", shape.has_weights},
      {"layout", layout_name(options.layout)},
      {"pad_multiple", options.pad_multiple},
      {"expert_stride", options.expert_stride},
      {"row_budget", options.row_budget ? Json(*options.row_budget) : Json()},
      {"overflow", options.overflow == Overflow::kError ? "error" : "drop"}};
}

Json output_to_json(const PlanData& plan) {
  return {
      {"num_rows", plan.num_rows},
      {"required_rows", plan.required_rows},
      {"overflow", plan.overflow},
      {"rows_per_expert", plan.rows_per_expert},
      {"padded_rows_per_expert", plan.padded_rows_per_expert},
      {"expert_begin", plan.expert_begin},
      {"padding", plan.padding},
      {"row_experts", plan.row_experts}};
}

Json arrivals_to_json(const std::vector<Arrivals>& pairs) {
  auto list = Json::array();
  for (const Arrivals& arrivals : pairs) {
    list.push_back(
        {{"token", arrivals.token},
         {"route_begin", arrivals.route_begin},
         {"slot", arrivals.slot},
         {"k", arrivals.k},
         {"expert", arrivals.expert},
         {"weight", floats_to_json(arrivals.weight)}}
    );
  }
  return list;
}

}  // namespace

std::string Plan::to_json() const {
  const Json whole = {
      {"format", kPlanFormat},
      {"version", kPlanVersion},
      {"shape", shape_to_json(data().shape)},
      {"output", output_to_json(data())},
      {"global_routes", data().global_routes},
      {"route_expert", data().route_expert},
      {"route_slot", data().route_slot},
      {"sent", arrivals_to_json(data().sent)},
      {"received", arrivals_to_json(data().received)}};
  return whole.dump() + "\n";
}

Plan Plan::from_json(std::string_view text, std::string_view name) {
  const nlohmann::json whole = parse_json(text, name);
  return Plan(std::make_shared<const PlanData>(plan_from_json(JsonNode(whole, name))));
}

void Plan::save(const std::string& path) const {
  write_file_atomically(path, to_json());
}

Plan Plan::load(const std::string& path) {
  return from_json(read_whole_file(path), path);
}

}  // namespace weft
