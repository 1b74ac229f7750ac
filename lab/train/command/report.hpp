// SPDX-License-Identifier: Apache-2.0
// What rank 0 knows about a training run, for people and for other programs: its steps, summed over
// ranks. Bounded however long the run is: neighbouring steps are merged once there are many.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "measure/limits.hpp"
#include "report/html.hpp"
#include "report/table.hpp"
#include "train/config.hpp"
#include "train/lanes/trace.hpp"
#include "train/trainer.hpp"

namespace weft::program {

// Forward and backward of overlapped steps; nothing without overlap.
struct LaneSeconds {
  double wall = 0;      // from the first begin to the last end
  double compute = 0;   // the lane was busy
  double exchange = 0;  // the same
  double exposed = 0;   // the exchange lane was busy, the compute lane not
};

// What every rank tells of a step; trivially copyable, travels between ranks.
struct RankStep {
  std::array<double, moe::kNumPhases> phase_seconds = {};
  double seconds = 0;
  LaneSeconds lanes = {};
  int64_t num_tokens = 0;
  moe::Traffic dispatch = {};
  moe::Traffic combine = {};
  double wait_seconds = 0;  // for the peer it waited for most, since the exchange was made
  int64_t wants_to_stop = 0;

  static RankStep from(const moe::StepReport& report);
};

// Bytes of all ranks together.
struct MovedBytes {
  double calls = 0;  // of one rank
  double wire = 0;
  double logical = 0;
  double tokens = 0;           // rows at their sources: calls x tokens
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
};

class TrainRecord {
 public:
  // `row_bytes`: of a token that travels.
  TrainRecord(const moe::TrainConfig& config, int64_t row_bytes)
      : model_(config.model), num_micro_batches_(config.num_micro_batches), row_bytes_(row_bytes) {}

  void add(const moe::StepReport& report, std::span<const RankStep> ranks);

  [[nodiscard]] const moe::ModelConfig& model() const { return model_; }
  [[nodiscard]] int64_t row_bytes() const { return row_bytes_; }
  [[nodiscard]] const std::vector<StepPoint>& points() const { return points_; }
  [[nodiscard]] int64_t num_steps() const { return num_steps_; }
  [[nodiscard]] int64_t last_step() const { return last_step_; }
  [[nodiscard]] int64_t num_tokens() const { return num_tokens_; }  // of all ranks and steps
  // A sum over the steps, as of one.
  [[nodiscard]] double per_step(double sum) const {
    return sum / static_cast<double>(std::max<int64_t>(num_steps_, 1));
  }
  [[nodiscard]] double seconds() const { return seconds_; }  // of the slowest rank of each step
  [[nodiscard]] double rank_seconds() const { return rank_seconds_; }  // mean over the ranks
  // Mean over the ranks, sum over the steps.
  [[nodiscard]] const std::array<double, moe::kNumPhases>& phase_seconds() const {
    return phase_seconds_;
  }
  // The same of the lanes.
  [[nodiscard]] const LaneSeconds& lanes() const { return lanes_; }
  // The last step of this rank; empty without overlap.
  [[nodiscard]] const overlap::Trace& trace() const { return trace_; }
  [[nodiscard]] const MovedBytes& dispatch() const { return dispatch_; }
  [[nodiscard]] const MovedBytes& combine() const { return combine_; }
  // Mean over the ranks of what they waited, at least, in plan, dispatch and combine.
  [[nodiscard]] double wait_seconds() const { return wait_seconds_; }
  // Mean loss of the last steps, at most ten.
  [[nodiscard]] double recent_loss() const;
  // Routes of one block's experts, mean over the last tenth of the steps.
  [[nodiscard]] std::vector<int64_t> recent_routes(int block) const;

 private:
  void add_moved(
      MovedBytes& sum,
      std::span<const RankStep> ranks,
      moe::Traffic RankStep::*traffic,
      moe::Phase phase
  ) const;
  void add_point(StepPoint point);

  moe::ModelConfig model_;
  int64_t num_micro_batches_;
  int64_t row_bytes_;
  int64_t steps_per_point_ = 1;
  std::vector<StepPoint> points_;
  std::vector<double> recent_;
  int64_t num_steps_ = 0;
  int64_t last_step_ = 0;
  int64_t num_tokens_ = 0;
  double seconds_ = 0;
  std::array<double, moe::kNumPhases> phase_seconds_ = {};
  double rank_seconds_ = 0;
  LaneSeconds lanes_;
  overlap::Trace trace_;
  double wait_seconds_ = 0;
  MovedBytes dispatch_;
  MovedBytes combine_;
};

// What does not change from step to step.
struct TrainFacts {
  std::string text_path;
  int64_t text_bytes = 0;
  moe::TrainConfig config;
  std::string transport;   // the one in use
  int num_gpus = 0;        // in use; 0: the cores
  bool is_copied = false;  // exchanges beside computation go by copy engines
  int num_ranks = 0;
  int64_t num_parameters = 0;
  int64_t num_active_parameters = 0;
  int64_t first_step = 0;  // that this run began with
  CopyRates rates = {};    // of plain copies; zero: not measured (yet)
};

[[nodiscard]] std::string train_headline(const TrainFacts& facts);
[[nodiscard]] Table loss_table(const TrainRecord& record);
[[nodiscard]] Table phase_table(const TrainRecord& record);
// Of overlapped steps: how long each lane worked, and how much of the exchange nothing hid.
[[nodiscard]] Table lane_table(const TrainRecord& record);
// What the two tables say, before them and between them.
[[nodiscard]] std::string phase_text(const TrainFacts& facts);
[[nodiscard]] std::string lane_text(const TrainRecord& record);
[[nodiscard]] Table exchange_table(const TrainFacts& facts, const TrainRecord& record);
// How long ranks waited for each other, in a sentence.
[[nodiscard]] std::string wait_text(const TrainRecord& record);
// One line per block: how busy its experts were lately.
[[nodiscard]] std::string load_picture(const TrainRecord& record);

[[nodiscard]] nlohmann::ordered_json train_json(const TrainFacts& facts, const TrainRecord& record);
[[nodiscard]] Page train_page(const TrainFacts& facts, const TrainRecord& record);

}  // namespace weft::program
