// SPDX-License-Identifier: Apache-2.0
// Sources of the routing of commands: a file of real routing, or a made-up one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/forward.hpp"
#include "plan/build.hpp"
#include "report/table.hpp"

namespace weft::program {

struct MadeUpRouting {
  int num_ranks = 4;
  int64_t num_tokens = 4096;  // of each rank
  int num_experts = 256;
  int topk = 8;
  double skew = 0;  // exponent of the experts' popularity
  uint64_t seed = 1;
};

struct RecordChoice {
  std::optional<int64_t> step;  // absent: the file's last
  std::optional<int> layer;     // absent: the first that the step has
};

// The routing of all ranks at one moment.
struct RoutingMoment {
  std::string name;
  int num_experts = 0;
  std::vector<RouteTable> routes;  // by rank
};

// Options of made-up routing that a file excludes: tokens, experts of a token, skew.
void add_made_up_options(CLI::App& command, CLI::Option* file, MadeUpRouting& made_up);
// The positional option of a file, the options of made-up routing but for ranks and experts, and of
// a record of the file.
CLI::Option* add_routing_options(
    CLI::App& command, std::string& file, MadeUpRouting& made_up, RecordChoice& choice
);
// Throws CLI::ValidationError for numbers that do not go together.
void check_made_up(const MadeUpRouting& spec);
// On all cores. `told` hears the share that is done, on the calling thread. Throws Error
// (kOutOfMemory) where there is no room for it.
[[nodiscard]] RoutingMoment make_up_routing(
    const MadeUpRouting& spec, const std::function<void(double)>& told = [](double) {}
);

// Throws Error (kFile) naming the file and its place for a missing or damaged file, Error
// (kInvalidArgument) with what there is for a record that the file does not have.
[[nodiscard]] RoutingMoment read_moment(const std::string& path, const RecordChoice& choice);

// Imbalance of each layer over the file's steps; of long files a sample.
[[nodiscard]] Table routing_file_table(const std::string& path);

// True for a file whose first byte begins a JSON object: a saved plan.
[[nodiscard]] bool is_saved_plan(const std::string& path);

}  // namespace weft::program
