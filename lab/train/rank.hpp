// SPDX-License-Identifier: Apache-2.0
// State that the layers of a rank share: its phases, scratch memory, and the calls of the exchange
// with rows in the type that layers compute in. The layers (layers/block.hpp, step_model.hpp) call
// it.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/clock.hpp"
#include "train/batch.hpp"
#include "train/config.hpp"
#include "train/layers/math.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"
#include "weft/overlap.hpp"

namespace weft::moe {

// Phases into which the time of a lane falls. They follow each other; starting one ends the one
// before.
enum class Phase : uint8_t {
  kDense,  // embedding, norms, output head, loss
  kRoute,
  kPlan,
  kDispatch,
  kExperts,
  kCombine,
  kReduce,     // gradients and values of parameters that every rank holds, and of replicas
  kOptimizer,  // AdamW
};

inline constexpr size_t kNumPhases = 8;
inline constexpr std::array<std::string_view, kNumPhases> kPhaseNames = {
    "dense", "route", "plan", "dispatch", "experts", "combine", "reduce", "optimizer"};

class PhaseTimer {
 public:
  void start(Phase phase) {
    const auto now = Clock::now();
    end_phase(now);
    phase_ = phase;
    since_ = now;
    is_running_ = true;
  }
  // Ends the current phase; what follows counts for none.
  void pause() {
    end_phase(Clock::now());
    is_running_ = false;
  }
  // Adds seconds to a phase, measured here or elsewhere.
  void add(Phase phase, double seconds) { seconds_[static_cast<size_t>(phase)] += seconds; }
  // Seconds by phase; only phases that have ended count.
  [[nodiscard]] const std::array<double, kNumPhases>& seconds() const { return seconds_; }

 private:
  void end_phase(Clock::time_point now) {
    if (is_running_) {
      add(phase_, std::chrono::duration<double>(now - since_).count());
    }
  }

  std::array<double, kNumPhases> seconds_ = {};
  Phase phase_ = Phase::kDense;
  bool is_running_ = false;
  Clock::time_point since_ = Clock::now();
};

// A plan and the rows that each of its exchanges moves.
struct CountedPlan {
  Plan plan;
  int64_t num_tokens = 0;
  int64_t wire_rows = 0;     // to other ranks
  int64_t logical_rows = 0;  // all, to this rank's own experts included
};

// Weights that travel with rows: those of the routes with a dispatch, back to them with a combine.
struct TravellingWeights {
  const float* from = nullptr;
  float* to = nullptr;
};

// Rows that one kind of operation moved, for one rank.
struct Traffic {
  int64_t calls = 0;
  int64_t wire_bytes = 0;     // to other ranks in a dispatch, from them in a combine
  int64_t logical_bytes = 0;  // all rows, this rank's own included

  void count(const CountedPlan& counted, int64_t row_bytes) {
    ++calls;
    wire_bytes += counted.wire_rows * row_bytes;
    logical_bytes += counted.logical_rows * row_bytes;
  }
};

// State that the blocks of a rank share, those of all micro-batches included.
struct MoeContext {
  Exchange& exchange;
  const ModelConfig& config;
  DType dtype = DType::kFloat32;         // of the rows that travel
  int64_t global_tokens = 0;             // of all ranks in a step
  bool has_two_lanes = false;            // exchanges run at the same time as computation
  int replicas = 0;                      // places on each rank, of every plan
  Exchange* replica_exchange = nullptr;  // carries their weights; null without
  PhaseTimer timer = {};
  PhaseTimer exchange_timer = {};  // of the second lane
  Traffic dispatch = {};           // written by the lane that calls the exchange
  Traffic combine = {};

  // Options of all plans of tokens.
  [[nodiscard]] PlanOptions plan_options() const {
    PlanOptions options = {.layout = Layout::kExpertMajor};
    if (replicas > 0) {
      options.order = SumOrder::kTopk;  // sums do not depend on where rows go
      options.balance.replicas = replicas;
    }
    return options;
  }
  [[nodiscard]] PhaseTimer& timer_of(overlap::Lane lane) {
    return has_two_lanes && lane == overlap::Lane::kExchange ? exchange_timer : timer;
  }
};

// Overwritten by every layer of every micro-batch, only on the compute lane.
struct Scratch {
  std::vector<float> grad_normed;  // [num_tokens, hidden]
  std::vector<float> grad_logits;  // [num_tokens, num_experts]

  // `most_tokens` of a micro-batch.
  Scratch(int64_t most_tokens, const ModelConfig& config) {
    grad_normed.resize(static_cast<size_t>(most_tokens * config.hidden));
    grad_logits.resize(static_cast<size_t>(most_tokens * config.num_experts));
  }
};

class Rank {
 public:
  Rank(MoeContext& context, int64_t most_tokens)
      : context_(&context), scratch_(most_tokens, context.config) {}

  // Starts a phase of a lane.
  void start(overlap::Lane lane, Phase phase) { context_->timer_of(lane).start(phase); }
  // With two lanes: ends the phase, as what lies between the pieces is nobody's time.
  void pause(overlap::Lane lane) {
    if (context_->has_two_lanes) {
      context_->timer_of(lane).pause();
    }
  }

  // --- the exchange, collective, on its lane ---
  [[nodiscard]] CountedPlan plan(int64_t num_tokens, const int32_t* topk_idx);  // [tokens, topk]
  // x [num_tokens, hidden]; weights from [num_tokens, topk] to [plan.num_rows()].
  [[nodiscard]] Buffer dispatch(
      const CountedPlan& counted,
      const float* x,
      const std::optional<TravellingWeights>& weights = {}
  );
  // rows [plan.num_rows(), hidden], x [num_tokens, hidden]; weights from [plan.num_rows()] to
  // [num_tokens, topk].
  void combine(
      const CountedPlan& counted,
      const float* rows,
      float* x,
      const std::optional<TravellingWeights>& weights = {}
  );
  // Weights of replicas and their gradients (replicas.hpp), by the exchange that has them: topk_idx
  // [num_tokens, num_ranks - 1]; from [num_tokens, hidden] to
  // [moves.num_rows(), hidden], and back.
  [[nodiscard]] Plan plan_weights(int64_t num_tokens, const std::vector<int32_t>& topk_idx);
  void send_weights(const Plan& moves, const float* from, float* to);
  void sum_gradients(const Plan& moves, const float* from, float* to);
  // Rows that a dispatch brought: themselves, or converted into `scratch`.
  [[nodiscard]] const float* values(const Buffer& rows, std::vector<float>& scratch) const;

  [[nodiscard]] Math& math() { return math_; }
  [[nodiscard]] Scratch& scratch() { return scratch_; }
  [[nodiscard]] MoeContext& context() { return *context_; }
  [[nodiscard]] const ModelConfig& config() const { return context_->config; }

 private:
  MoeContext* context_;
  Math math_;
  Scratch scratch_;
  std::vector<uint16_t> sent_;  // rows on their way as bf16
  std::vector<uint16_t> arrived_;
};

}  // namespace weft::moe
