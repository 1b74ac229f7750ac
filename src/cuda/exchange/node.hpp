// SPDX-License-Identifier: Apache-2.0
// What the executor of several hosts (src/hosts) needs of the CUDA executor of its own domain,
// in addition to the calls of every executor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "call/executor.hpp"
#include "core/context.hpp"
#include "cuda/layout/plan.hpp"
#include "plan/plan_data.hpp"

namespace weft {

class NodeExchange : public Executor {
 public:
  // Its ranks are `ranks` of the group of `whole`, and messages call them so from now on.
  // `num_sharing` ranks of that group share this GPU, and `num_kept_sms` of its multiprocessors are
  // kept for other kernels.
  virtual void join(
      const Context& whole, std::span<const int> ranks, int num_sharing, int num_kept_sms
  ) = 0;
  // The geometry of its plan blocks.
  [[nodiscard]] virtual const PlanMap& plan_map() const = 0;
  // A plan of the shape `data` that the host has made. `image` is host memory that the GPU reads
  // and that must stay until the stream has passed. Collective, like make_plan; `number` tells
  // calls apart and must be equal on all ranks.
  [[nodiscard]] virtual Plan import_plan(
      PlanData data,
      const std::byte* image,
      std::span<const ImportedRecords> records,
      int64_t number,
      cudaStream_t stream
  ) = 0;
  // Waits for the stream, then throws what check() would.
  virtual void finish(cudaStream_t stream) = 0;
  // Whether check() would throw; any thread may ask.
  [[nodiscard]] virtual bool has_fault() const = 0;
};

// Collective. `has_eager_rows`: memory is reserved for fused plan and dispatch.
[[nodiscard]] std::unique_ptr<NodeExchange> make_node_exchange(
    const Group& group, const ExchangeConfig& config, bool has_eager_rows
);

}  // namespace weft
