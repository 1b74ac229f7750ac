// SPDX-License-Identifier: Apache-2.0
// Copies a plan that kernels made to the host, as a PlanData. Before: the kernels of plan/; after:
// callers that ask a plan for more than its shape.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "cuda/layout/control.hpp"
#include "cuda/layout/plan.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// Waits in `stream`, at most me.timeout_ns, until the records of all sources are in `plan`, then
// reads the whole block. `shape` is what the host knows: all but options.expert_stride, which is
// resolved here. Blocks the caller; not while the stream is captured. `exchange_id` and `call` are
// left to the caller. Throws Error: kTimeout if records are missing, kCuda, kInternal if the block
// is no plan of this shape.
[[nodiscard]] PlanData download_plan(
    const RankView& me, const PlanView& plan, const PlanShape& shape, cudaStream_t stream
);

// Reads only the shape of this rank's output, without a wait for records. Returns nothing if the
// call that should have made the plan was given up.
[[nodiscard]] std::optional<PlanData> download_shape(
    const RankView& me, const PlanView& plan, const PlanShape& shape, cudaStream_t stream
);

// Reads the shape of this rank's output from the header and the first arrays of a block on the
// host: all from num_rows to global_routes but row_experts, options.expert_stride and the placement
// of replicas.
void read_output_shape(const PlanView& block, PlanData& data);

}  // namespace weft
