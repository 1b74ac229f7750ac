// SPDX-License-Identifier: Apache-2.0
// Model of the links, cards and memories of a machine: rates and costs, each with its origin. Saved
// and loaded as JSON; command/calibrate.cpp measures one. memory.cpp and replay.cpp reckon with it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::sim {

// How long one rank's own work in a plan took, or would take: counting, placing, records.
struct PlanSample {
  int num_ranks = 0;
  int num_experts = 0;
  int64_t num_tokens = 0;
  double us = 0;
};

// Every number is a field of model_fields(), which says what it means.
struct Model {
  std::string name;
  std::map<std::string, std::string, std::less<>> origin;  // of each field: "measured: ...", ...

  std::vector<PlanSample> plan_samples;  // what the plan's numbers were fitted to, if they were

  double link_gbps = 0;
  double link_latency_us = 0;
  double link_signal_us = 0;
  double copy_gbps = 0;
  double one_mover = 0;
  double card_gbps = 0;
  double card_latency_us = 0;
  double card_messages = 0;
  double card_window = 0;
  double post_us = 0;
  double proxies = 0;
  double message_rows = 0;
  double call_us = 0;
  double plan_base_us = 0;
  double plan_token_ns = 0;
  double plan_count_ns = 0;
};

struct ModelField {
  std::string_view name;
  double Model::*value;
  double least;
  std::string_view meaning;
};

[[nodiscard]] std::span<const ModelField> model_fields();

// GPUs with NVLink, measured on 4 x H200, and a 400 Gb/s card for each, which is assumed.
[[nodiscard]] Model h200_model();

// Throws Error (kInvalidArgument) for a name that is no field or a number below its least.
void set_field(Model& model, std::string_view name, double value, std::string_view origin);

// One rank's own work in a plan by the model, in microseconds.
[[nodiscard]] double plan_work_us(
    const Model& model, int num_ranks, int num_experts, int64_t num_tokens
);

[[nodiscard]] std::string model_json(const Model& model);
// Throws Error (kFile) naming the file and the field.
[[nodiscard]] Model load_model(const std::string& path);

}  // namespace weft::sim
