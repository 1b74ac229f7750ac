// SPDX-License-Identifier: Apache-2.0
// HostRank on a GPU: a stream for each lane, bf16 rows, all tensors in the GPU's memory. Each call
// queues its work on the stream of its lane.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/gpu/stream.hpp"
#include "train/gpu/math.hpp"
#include "train/gpu/timed_event.hpp"
#include "train/rank.hpp"

namespace weft::moe {

// PhaseTimer for work that is queued on two streams: marks between the kernels, read when all is
// over.
class LanePhases {
 public:
  // What the stream comes to from here on is this phase; none: no phase's.
  void mark(overlap::Lane lane, std::optional<Phase> phase, cudaStream_t stream);
  // Adds what was marked on a lane, whose stream must be through, and forgets it.
  void read(overlap::Lane lane, PhaseTimer& timer);
  void forget() { marks_ = {}; }

 private:
  struct Mark {
    TimedEvent event;
    std::optional<Phase> phase;
  };
  struct Marks {
    std::deque<Mark> all;  // reused, as making an event takes time
    size_t num = 0;
  };

  std::array<Marks, overlap::kNumLanes> marks_;
};

class GpuRank {
 public:
  using Math = DeviceMath;
  static constexpr bool kReleasesRows = false;

  // Without two lanes in the context both have the same stream. `most_tokens` of a micro-batch.
  GpuRank(const Group& group, MoeContext& context, int64_t most_tokens);

  [[nodiscard]] static Shards shards_of(const MicroBatch& micro_batch) {
    return one_shard(micro_batch.tokens.size());
  }

  // Makes the rank's GPU current for the calling thread.
  void enter() const;
  // Starts a phase of a lane. With one lane it waits for the stream first, so that a phase has the
  // time of its own work; with two it only leaves a mark.
  void start(overlap::Lane lane, Phase phase);
  void pause(overlap::Lane lane);
  // With two lanes: adds all that were marked to the timers, once the streams are through.
  void read_phases();
  void forget_phases() { phases_.forget(); }
  // Waits for the streams; throws what the GPU or the exchange found.
  void synchronize();

  template <class T>
  void fetch(const DeviceArray<T>& from, std::vector<T>& to) {
    enter();
    math_.download(from, to);
    synchronize();
  }

  // --- the exchange, collective, on its lane ---
  [[nodiscard]] CountedPlan plan(int64_t num_tokens, const int32_t* topk_idx);
  [[nodiscard]] Buffer dispatch(
      const CountedPlan& counted,
      bool is_overlapped,
      const uint16_t* x,
      const std::optional<TravellingWeights>& weights = {}
  );
  void combine(
      const CountedPlan& counted,
      bool is_overlapped,
      const uint16_t* rows,
      uint16_t* x,
      const std::optional<TravellingWeights>& weights = {}
  );
  [[nodiscard]] Plan plan_weights(int64_t num_tokens, const std::vector<int32_t>& topk_idx);
  void send_weights(const Plan& moves, bool is_overlapped, const uint16_t* from, uint16_t* to);
  void sum_gradients(const Plan& moves, bool is_overlapped, const float* from, float* to);
  void add(const uint16_t* from, float* to, int64_t size) {
    add_cuda(from, to, size, exchange_stream_.get());
  }
  void round(const float* from, uint16_t* to, int64_t size) {
    to_bf16_cuda(from, to, size, exchange_stream_.get());
  }
  void copy(const uint16_t* from, uint16_t* to, int64_t size) const;
  void clear(DeviceArray<float>& array) { array.clear(exchange_stream_.get()); }

  [[nodiscard]] const uint16_t* values(const Buffer& rows, DeviceArray<uint16_t>&) const {
    return reinterpret_cast<const uint16_t*>(rows.tensor().data);
  }

  [[nodiscard]] cudaStream_t stream(overlap::Lane lane = overlap::Lane::kCompute) const {
    return lane == overlap::Lane::kExchange ? exchange_stream_.get() : stream_.get();
  }
  [[nodiscard]] DeviceMath& math() { return math_; }
  [[nodiscard]] Scratch<DeviceMath>& scratch() { return scratch_; }
  [[nodiscard]] MoeContext& context() { return *context_; }
  [[nodiscard]] const ModelConfig& config() const { return context_->config; }

 private:
  [[nodiscard]] CallOptions call(const Exchange& exchange, bool is_overlapped, bool is_dispatch)
      const;
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
  DeviceMath math_;
  Scratch<DeviceMath> scratch_;
  LanePhases phases_;
  DeviceArray<int32_t> moved_to_;  // what plan_weights() was given
};

}  // namespace weft::moe
