// SPDX-License-Identifier: Apache-2.0
// Trains the model on a text, one step at a time: draws the tokens of a step (batch.hpp), lets the
// model compute their gradients (step_model.hpp), sums and applies them (replicated_vector.hpp),
// and saves and resumes all of it (checkpoint.hpp). command/command.cpp runs one on each rank.
//
// The loss of a step depends on the seed, the global batch and the number of micro-batches it is
// cut into, not on their overlap, nor on the number of ranks: in fp32 with at most two experts to a
// token the bits are the same for one to eight ranks, otherwise they are equal to rounding. Two
// runs on equal ranks always have the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/batch.hpp"
#include "train/checkpoint.hpp"
#include "train/config.hpp"
#include "train/lanes/schedule.hpp"
#include "train/layers/parameters.hpp"
#include "train/replicated_vector.hpp"
#include "train/step_model.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

// Report of this rank on a step; trivially copyable.
struct RankReport {
  int64_t num_tokens = 0;
  double seconds = 0;  // of the whole step
  // Seconds by Phase. Without overlap they add up to `seconds`; with it each is the time that its
  // lane worked on it, and lanes work at the same time.
  std::array<double, kNumPhases> phase_seconds = {};
  Traffic dispatch = {};  // tokens
  Traffic combine = {};
};

struct StepReport : RankReport {
  int64_t step = 0;           // number of steps done, this one included
  double loss = 0;            // nats per byte, mean over the global batch; same on every rank
  double balance_loss = 0;    // mean over the blocks, 1 = perfectly even; same on every rank
  int64_t global_tokens = 0;  // of all ranks
  // Routes of the busiest rank with and without replicas, and of the mean rank, summed over blocks
  // and micro-batches; the same on every rank. Zero without balance.
  double busiest = 0;
  double unbalanced = 0;
  double mean_load = 0;
  overlap::Trace trace;         // with overlap: forward and backward on the two lanes of this rank
  std::vector<int64_t> routes;  // [num_blocks, num_experts] of all ranks
};

class Trainer {
 public:
  // Collective. `text` must stay alive and be the same on every rank. Throws Error
  // (kInvalidArgument) for a wrong configuration or a text of at most `window` bytes.
  Trainer(const Group& group, const TrainConfig& config, std::span<const std::byte> text);
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Collective. Forward, backward and one update of all parameters.
  StepReport step();

  // Collective; the path must mean the same file on every rank. The old file stays whole until the
  // new one is complete on the disk. Throws Error (kFile) on every rank.
  void save(const std::string& path);
  // Collective. Continues where save() stopped, with any number of ranks; with the same number the
  // same bits. Model, global batch, seed, dtype and text must be those of the file; learning rate,
  // schedule and micro-batches may change. Throws Error (kFile) on every rank, naming the file and
  // what is wrong; the trainer is then as before.
  void resume(const std::string& path);

  [[nodiscard]] const TrainConfig& config() const { return config_; }
  [[nodiscard]] int64_t steps_done() const { return steps_done_; }
  [[nodiscard]] int64_t num_parameters() const { return static_cast<int64_t>(layout_.num_model); }
  [[nodiscard]] int64_t num_active_parameters() const;  // that one token meets
  [[nodiscard]] int64_t num_tokens() const;             // of this rank in a step
  // Collective. A number that two trainers share if all their parameters have equal bits.
  [[nodiscard]] uint64_t fingerprint();

  // Routing of this rank's tokens in the last step, [num_tokens, topk], micro-batch after
  // micro-batch; empty before the first.
  [[nodiscard]] std::span<const int32_t> last_topk_idx(int block) const {
    return model_->topk_idx(block);
  }

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }  // the one that moves tokens

 private:
  void compute_gradients();
  void update();
  void update_own(const AdamStep& adam);
  [[nodiscard]] StepReport make_report();
  [[nodiscard]] std::vector<StatePiece> pieces();
  [[nodiscard]] CheckpointHeader header() const;

  Group group_;
  TrainConfig config_;
  std::span<const std::byte> text_;
  BatchSource source_;
  std::vector<MicroBatch> micro_batches_;  // of every step
  ModelLayout layout_;
  Exchange exchange_;
  std::optional<Exchange> replica_exchange_;
  ReplicatedVector replicated_;  // the parameters, then the scalars of a step
  std::vector<float> expert_values_;
  std::vector<float> expert_grads_;
  AdamMoments own_moments_;
  AdamMoments expert_moments_;
  MoeContext context_;
  std::unique_ptr<StepModel> model_;
  std::vector<Batch> batches_;
  int64_t steps_done_ = 0;
};

}  // namespace weft::moe
