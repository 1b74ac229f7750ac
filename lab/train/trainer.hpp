// SPDX-License-Identifier: Apache-2.0
// Trains the model on a text, one step at a time. All that a program needs of this folder, with
// text.hpp for reading the file.
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
#include <span>
#include <string>
#include <vector>

#include "train/config.hpp"
#include "train/lanes/trace.hpp"
#include "train/phase_timer.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

struct StepReport {
  int64_t step = 0;           // number of steps done, this one included
  double loss = 0;            // nats per byte, mean over the global batch; same on every rank
  double balance_loss = 0;    // mean over the blocks, 1 = perfectly even; same on every rank
  float learning_rate = 0;    // that this step used
  int64_t num_tokens = 0;     // of this rank
  int64_t global_tokens = 0;  // of all ranks
  double seconds = 0;         // of the whole step on this rank
  // By Phase, of this rank. Without overlap they add up to `seconds`; with it each is the time that
  // its lane worked on it, and lanes work at the same time.
  std::array<double, kNumPhases> phase_seconds = {};
  overlap::Trace trace;  // with overlap: forward and backward on the two lanes of this rank
  Traffic dispatch;      // tokens, of this rank
  Traffic combine;
  Traffic reduce;               // replicated parameters: gradients in, new values out
  std::vector<int64_t> routes;  // [num_blocks, num_experts] of all ranks
};

class Trainer {
 public:
  // Collective. `text` must stay alive and be the same on every rank. Throws Error
  // (kInvalidArgument) for a wrong configuration or a text of at most `window` bytes.
  Trainer(const Group& group, const TrainConfig& config, std::span<const std::byte> text);
  ~Trainer();
  Trainer(Trainer&&) noexcept;
  Trainer& operator=(Trainer&&) noexcept;

  // Collective. Forward, backward and one update of all parameters.
  StepReport step();

  // Collective; the path must mean the same file on every rank. The old file stays whole until the
  // new one is complete on the disk. Throws Error (kFile) on every rank.
  void save(const std::string& path) const;
  // Collective. Continues where save() stopped, with any number of ranks; with the same number the
  // same bits. Model, global batch, seed, dtype and text must be those of the file; learning rate,
  // schedule and micro-batches may change. Throws Error (kFile) on every rank, naming the file and
  // what is wrong; the trainer is then as before.
  void resume(const std::string& path);

  [[nodiscard]] const TrainConfig& config() const;
  [[nodiscard]] int64_t steps_done() const;
  [[nodiscard]] int64_t num_parameters() const;         // of the model
  [[nodiscard]] int64_t num_active_parameters() const;  // that one token meets
  [[nodiscard]] int64_t num_local_parameters() const;   // that this rank stores
  [[nodiscard]] int64_t num_tokens() const;             // of this rank in a step
  // Collective. A number that two trainers share if all their parameters have equal bits.
  [[nodiscard]] uint64_t fingerprint() const;

  // Routing of this rank's tokens in the last step, [num_tokens, topk], micro-batch after
  // micro-batch; empty before the first.
  [[nodiscard]] std::span<const int32_t> last_topk_idx(int block) const;
  [[nodiscard]] std::span<const float> last_topk_weights(int block) const;

  [[nodiscard]] const Exchange& exchange() const;  // the one that moves tokens

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Whether copy engines carry the rows of exchanges that share the GPU with computation; the same on
// every rank if WEFT_COPY_ENGINES is.
[[nodiscard]] bool uses_copy_engines(const TrainConfig& config, const Group& group);

// make(wanted); without room for copies if that is more than some rank has memory for.
[[nodiscard]] Exchange make_exchange(
    const ExchangeConfig& wanted, const std::function<Exchange(const ExchangeConfig&)>& make
);

}  // namespace weft::moe
