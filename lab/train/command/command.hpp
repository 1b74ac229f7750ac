// SPDX-License-Identifier: Apache-2.0
// `weft-lab train`: the command, and what rank 0 knows about a training run, for people and for
// other programs: its steps, summed over ranks. Bounded however long the run is: neighbouring steps
// are merged once there are many.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/forward.hpp"
#include "measure/limits.hpp"
#include "report/html.hpp"
#include "train/config.hpp"
#include "train/lanes/schedule.hpp"
#include "train/trainer.hpp"

namespace weft::program {

void add_train(CLI::App& app);

// Forward and backward of overlapped steps; nothing without overlap.
struct LaneSeconds {
  double wall = 0;      // from the first begin to the last end
  double compute = 0;   // the lane was busy
  double exchange = 0;  // the same
  double exposed = 0;   // the exchange lane was busy, the compute lane not
};

// Report of one rank on a step; trivially copyable, travels between ranks.
struct RankStep : moe::RankReport {
  overlap::LaneTimes lanes = {};
  double wait_seconds = 0;  // for the peer it waited for most, since the exchange was made
  bool wants_to_stop = false;
};

// Bytes of all ranks together.
struct MovedBytes {
  double calls = 0;  // of one rank
  double wire = 0;
  double logical = 0;
  double seconds = 0;          // of the slowest rank, which may have waited for others
  double fastest_seconds = 0;  // of the rank that came last and waited least
};

// One step, or the means of several neighbours.
struct StepPoint {
  double step = 0;  // the last one of the neighbours
  int64_t num_steps = 1;
  double loss = 0;
  double balance_loss = 0;
  double seconds = 0;          // of the slowest rank
  std::vector<double> routes;  // [num_blocks, num_experts]

  // Adds the next steps: the means are of all of them.
  void merge(const StepPoint& next);
};

// All steps of a run so far. Sums over the steps are means over the ranks where nothing else is
// said.
struct TrainRecord {
  moe::ModelConfig model;

  int64_t steps_per_point = 1;
  std::vector<StepPoint> points = {};
  std::vector<double> recent_losses = {};  // of the last steps, at most ten
  int64_t num_steps = 0;
  int64_t last_step = 0;
  int64_t num_tokens = 0;  // of all ranks
  double seconds = 0;      // of the slowest rank of each step
  double rank_seconds = 0;
  std::array<double, moe::kNumPhases> phase_seconds = {};
  LaneSeconds lanes = {};
  overlap::Trace trace = {};  // the last step of this rank; empty without overlap
  double wait_seconds = 0;    // what a rank waited, at least, in plan, dispatch and combine
  // Sums over steps, micro-batches and blocks of the busiest rank's routes, with replicas and
  // without, and of the mean rank's; zero without balance.
  double busiest = 0;
  double unbalanced = 0;
  double mean_load = 0;
  MovedBytes dispatch = {};
  MovedBytes combine = {};

  void add(const moe::StepReport& report, std::span<const RankStep> ranks);

  // A sum over the steps, as of one.
  [[nodiscard]] double per_step(double sum) const {
    return sum / static_cast<double>(std::max<int64_t>(num_steps, 1));
  }
  // Mean loss of the last steps, at most ten.
  [[nodiscard]] double recent_loss() const;
  // Routes of one block's experts, mean over the last tenth of the steps.
  [[nodiscard]] std::vector<int64_t> recent_routes(int block) const;
};

// Facts that do not change from step to step.
struct TrainFacts {
  std::string text_path;
  int64_t text_bytes = 0;
  moe::TrainConfig config;
  std::string transport;  // the one in use
  int num_ranks = 0;
  int64_t num_parameters = 0;
  int64_t num_active_parameters = 0;
  int64_t first_step = 0;  // that this run began with
  CopyRates rates = {};    // of plain copies; zero: not measured (yet)
};

// Texts that are printed before the first step and after the last one.
[[nodiscard]] std::string train_headline(const TrainFacts& facts);
[[nodiscard]] std::string train_text(const TrainFacts& facts, const TrainRecord& record);
[[nodiscard]] nlohmann::ordered_json train_json(const TrainFacts& facts, const TrainRecord& record);
[[nodiscard]] Page train_page(const TrainFacts& facts, const TrainRecord& record);

}  // namespace weft::program
