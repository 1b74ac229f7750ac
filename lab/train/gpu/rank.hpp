// SPDX-License-Identifier: Apache-2.0
// What the layers of one rank share on its GPU: a stream for each lane, scratch memory, and the
// calls of the exchange on them.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/gpu/stream.hpp"
#include "train/gpu/device_array.hpp"
#include "train/gpu/kernels.hpp"
#include "train/gpu/linear.hpp"
#include "train/layers/moe_block.hpp"
#include "train/phase_timer.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"
#include "weft/overlap.hpp"

namespace weft::moe {

// PhaseTimer for work that is queued on two streams: marks between the kernels, read when all is
// over.
class LanePhases {
 public:
  // What the stream comes to from here on is this phase; none: no phase's.
  void mark(overlap::Lane lane, std::optional<Phase> phase, cudaStream_t stream);
  // Adds what was marked on a lane, whose stream must be through, and forgets it.
  void read(overlap::Lane lane, PhaseTimer& timer);

 private:
  struct EventEnd {
    void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
  };
  using EventOwner = std::unique_ptr<CUevent_st, EventEnd>;

  struct Mark {
    EventOwner event;
    std::optional<Phase> phase;
  };

  std::array<std::vector<Mark>, overlap::kNumLanes> marks_;
  std::vector<EventOwner> unused_;
};

// Overwritten by every layer of every micro-batch, only on the compute lane.
struct DeviceScratch {
  DeviceArray<float> grad_normed;     // [num_tokens, hidden]
  DeviceArray<float> gain_terms;      // [num_tokens, hidden]
  DeviceArray<uint16_t> grad_logits;  // [num_tokens, num_experts]
  DeviceArray<float> sum_parts;       // [kSumParts, the larger of hidden and num_experts]
};

// Overwritten by every layer of one micro-batch. Both lanes use it, each piece of the micro-batch
// after the one before it.
struct DeviceTokens {
  int64_t num_tokens = 0;
  // Of the micro-batches in a step. With overlap no computation runs at the same time as the
  // forward of the first and the backward of the last; gradients are added to those of the ones
  // before.
  bool is_first = true;
  bool is_last = true;
  DeviceArray<uint16_t> tokens;      // [num_tokens, hidden]
  DeviceArray<float> grad_weights;   // [num_tokens, topk]
  DeviceArray<uint16_t> expert_out;  // [num_rows, hidden]
  DeviceArray<float> row_grads;      // [num_rows]
  Buffer grad_rows;                  // [num_rows, hidden] gradients as they arrived

  DeviceTokens(int64_t num_tokens, bool is_first, bool is_last, const ModelConfig& config);
};

// A plan and the rows that each of its exchanges moves. Counted here from the routing, because a
// plan on a GPU would have to come to the host as a whole to tell.
struct CountedPlan {
  Plan plan;
  int64_t num_tokens = 0;
  int64_t wire_rows = 0;     // to other ranks
  int64_t logical_rows = 0;  // to this rank's experts
};

class GpuRank {
 public:
  // Without two lanes in the context both have the same stream. `most_tokens` of a micro-batch.
  GpuRank(const Group& group, MoeContext& context, int64_t most_tokens);

  // Makes the rank's GPU current for the calling thread.
  void enter() const;
  // Starts a phase of a lane. With one lane it waits for the stream first, so that a phase has the
  // time of its own work; with two it only leaves a mark.
  void start(overlap::Lane lane, Phase phase);
  // With two lanes: ends the phase; adds all that were marked to the timers, once the streams are
  // through.
  void pause(overlap::Lane lane);
  void read_phases();
  void forget_phases() { phases_ = {}; }
  // Waits for the streams; throws what the GPU or the exchange found.
  void synchronize();

  // --- the exchange, collective, on its lane: bf16 rows, fp32 weights, all in device memory ---
  [[nodiscard]] CountedPlan plan(int64_t num_tokens, const int32_t* topk_idx);  // [tokens, topk]
  // x [num_tokens, hidden], weights [num_tokens, topk], row_weights [plan.num_rows()]; both weights
  // may be null. With `is_overlapped` the GPU computes at
  // the same time; so in combine.
  [[nodiscard]] Buffer dispatch(
      const CountedPlan& counted,
      bool is_overlapped,
      const uint16_t* x,
      const float* weights,
      float* row_weights
  );
  // rows [plan.num_rows(), hidden], row_grads [plan.num_rows()], x [num_tokens, hidden], grads
  // [num_tokens, topk]; both gradients may be null.
  void combine(
      const CountedPlan& counted,
      bool is_overlapped,
      const uint16_t* rows,
      const float* row_grads,
      uint16_t* x,
      float* grads
  );

  [[nodiscard]] cudaStream_t stream(overlap::Lane lane = overlap::Lane::kCompute) const {
    return lane == overlap::Lane::kExchange ? exchange_stream_.get() : stream_.get();
  }
  [[nodiscard]] DeviceLinear& linear() { return linear_; }
  [[nodiscard]] DeviceScratch& scratch() { return scratch_; }
  [[nodiscard]] MoeContext& context() { return *context_; }
  [[nodiscard]] const ModelConfig& config() const { return context_->config; }

 private:
  [[nodiscard]] int64_t count_wire_rows(int64_t num_tokens, const int32_t* topk_idx);
  void count(Traffic& traffic, const CountedPlan& counted) const;
  [[nodiscard]] CallOptions call(bool is_overlapped, bool is_dispatch) const;
  void wait_for_exchange();
  void meet();
  void part();
  template <class Data>
  [[nodiscard]] auto tensor(Data* data, DType dtype, int64_t rows, int64_t cols) const;

  const Group* group_;
  MoeContext* context_;
  bool shares_process_;
  int num_gpu_sms_ = 0;
  GpuStream stream_;
  GpuStream exchange_stream_;
  DeviceLinear linear_;
  DeviceScratch scratch_;
  LanePhases phases_;
  std::vector<int32_t> host_topk_idx_;
};

// A norm before a layer, as RmsNorm on the host.
class DeviceNorm {
 public:
  // For the tokens of one micro-batch, which outlive it. gain: [hidden].
  DeviceNorm(GpuRank& rank, const DeviceTokens& tokens, const DeviceParameter& gain);

  // Both queue their work on the stream of the compute lane. Keeps a copy of x [num_tokens,
  // hidden].
  void forward(const float* x);
  // grad_x += the gradient for x, from that for normed() in the scratch memory.
  void backward(float* grad_x);

  [[nodiscard]] const uint16_t* normed() const { return normed_.data(); }  // [num_tokens, hidden]
  [[nodiscard]] size_t size() const { return x_.size(); }

 private:
  [[nodiscard]] NormShape shape() {
    const int64_t hidden = rank_->config().hidden;
    return {tokens_->num_tokens, hidden, x_.data(), gain_.value, inverse_rms_.data()};
  }

  GpuRank* rank_;
  const DeviceTokens* tokens_;
  DeviceParameter gain_;
  DeviceArray<float> x_;
  DeviceArray<float> inverse_rms_;  // [num_tokens]
  DeviceArray<uint16_t> normed_;
};

}  // namespace weft::moe
