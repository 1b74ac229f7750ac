// SPDX-License-Identifier: Apache-2.0
// What the layers of one rank share on its GPU: a stream, scratch memory, and the calls of the
// exchange on them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "core/stream_cuda.hpp"
#include "moe/device_array_cuda.hpp"
#include "moe/linear_cuda.hpp"
#include "moe/moe_block.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"

namespace weft::moe {

// Overwritten by every layer.
struct DeviceScratch {
  DeviceArray<uint16_t> tokens;       // [num_tokens, hidden]
  DeviceArray<float> grad_normed;     // [num_tokens, hidden]
  DeviceArray<float> gain_terms;      // [num_tokens, hidden]
  DeviceArray<uint16_t> grad_logits;  // [num_tokens, num_experts]
  DeviceArray<float> grad_weights;    // [num_tokens, topk]
  DeviceArray<float> sum_parts;       // [kSumParts, the larger of hidden and num_experts]
  DeviceArray<uint16_t> expert_out;   // [num_rows, hidden]
  DeviceArray<float> row_grads;       // [num_rows]
};

// A plan and the rows that each of its exchanges moves. Counted here from the routing, because a
// plan on a GPU would have to come to the host as a whole to tell.
struct CountedPlan {
  Plan plan;
  int64_t wire_rows = 0;     // to other ranks
  int64_t logical_rows = 0;  // to this rank's experts
};

class GpuRank {
 public:
  GpuRank(const Group& group, MoeContext& context, int64_t num_tokens);

  // Makes the rank's GPU current for the calling thread.
  void enter() const;
  // Waits for the stream, so that a phase has the time of its own work, and starts the next.
  void start(Phase phase);
  // Waits for the stream; throws what the GPU or the exchange found.
  void synchronize();

  // --- the exchange, collective: bf16 rows, fp32 weights, all in device memory ---
  [[nodiscard]] CountedPlan plan(const int32_t* topk_idx);  // [num_tokens, topk]
  // x [num_tokens, hidden], weights [num_tokens, topk], row_weights [plan.num_rows()]; both weights
  // may be null.
  [[nodiscard]] Buffer dispatch(
      const CountedPlan& counted, const uint16_t* x, const float* weights, float* row_weights
  );
  // rows [plan.num_rows(), hidden], row_grads [plan.num_rows()], x [num_tokens, hidden], grads
  // [num_tokens, topk]; both gradients may be null.
  void combine(
      const CountedPlan& counted,
      const uint16_t* rows,
      const float* row_grads,
      uint16_t* x,
      float* grads
  );

  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }
  [[nodiscard]] DeviceLinear& linear() { return linear_; }
  [[nodiscard]] DeviceScratch& scratch() { return scratch_; }
  [[nodiscard]] MoeContext& context() { return *context_; }
  [[nodiscard]] const ModelConfig& config() const { return context_->config; }
  [[nodiscard]] int64_t num_tokens() const { return num_tokens_; }

 private:
  [[nodiscard]] int64_t count_wire_rows(const int32_t* topk_idx);
  void count(Traffic& traffic, const CountedPlan& counted) const;
  void meet();
  void part();
  template <class Data>
  [[nodiscard]] auto tensor(Data* data, DType dtype, int64_t rows, int64_t cols) const;

  const Group* group_;
  MoeContext* context_;
  int64_t num_tokens_;
  bool shares_process_;
  GpuStream stream_;
  DeviceLinear linear_;
  DeviceScratch scratch_;
  std::vector<int32_t> host_topk_idx_;
};

}  // namespace weft::moe
