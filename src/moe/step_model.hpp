// SPDX-License-Identifier: Apache-2.0
// What computes a step, wherever it does: host_model.hpp or device_model.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "moe/batch.hpp"
#include "moe/model.hpp"
#include "overlap/trace.hpp"
#include "weft/plan.hpp"

namespace weft::moe {

class StepModel {
 public:
  StepModel() = default;
  virtual ~StepModel() = default;
  StepModel(const StepModel&) = delete;
  StepModel& operator=(const StepModel&) = delete;

  // Collective. Forward and backward of every micro-batch of the step; adds up their losses, and
  // their gradients in their order. With overlap the exchange is called from another thread, and
  // what that throws is thrown here. Where one rank alone throws, the others throw what their
  // exchange then says, at the latest at its deadline, and it is of no more use.
  virtual LossShare forward_backward(std::span<const Batch> batches) = 0;

  // Of the last forward_backward; the spans, in host memory, until the next.
  // What ran when on the two lanes; empty without overlap.
  [[nodiscard]] virtual const overlap::Trace& trace() const = 0;
  [[nodiscard]] virtual const Plan& plan(size_t micro_batch, int block) const = 0;
  // [num_tokens, topk] of all micro-batches, one after another; empty before the first.
  [[nodiscard]] virtual std::span<const int32_t> topk_idx(int block) = 0;
  [[nodiscard]] virtual std::span<const float> weights(int block) = 0;
};

}  // namespace weft::moe
