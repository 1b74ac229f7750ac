// SPDX-License-Identifier: Apache-2.0
// What `weft simulate` is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan_source.hpp"
#include "simulate/model.hpp"
#include "simulate/scenario.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

struct SimulateOptions {
  std::string file;  // of real routing; empty: made up
  RecordChoice choice;
  MadeUpRouting made_up = {};     // its num_ranks and num_experts are set for each size
  std::vector<int> sizes = {16};  // ranks
  int ranks_per_domain = 8;
  int num_experts = 256;  // rounded up to a multiple of the ranks
  int64_t hidden = 7168;
  DType dtype = DType::kBFloat16;
  int64_t pad_multiple = 1;
  bool is_flat = false;

  std::string model_path;
  std::vector<std::string> settings;  // "card_gbps=100"
  bool shows_model = false;
  std::string calibrate_path;
  std::vector<std::string> tables;  // empty: all
  std::string json_path;
  bool with_ends = false;
  int64_t budget_bytes = 600'000'000;
};

// Of `num_ranks`; a domain is not larger than the group. Throws CLI::ValidationError for what does
// not fit.
[[nodiscard]] sim::Scenario make_scenario(const SimulateOptions& options, int num_ranks);

}  // namespace weft::program
