// SPDX-License-Identifier: Apache-2.0
// The forward of one layer woven into the backward of another, so that each of the four exchanges
// hides under work of the other micro-batch.
#pragma once

#include "overlap/chunk_plan.hpp"

namespace weft::overlap {

struct OverlapOptions {
  // Runs the attention's backward before the forward of mlp, not after it: less memory, less
  // overlap.
  bool early_attention_release = false;
};

// Issues both layers; either may be null. On every rank the exchange lane sees combine-backward,
// dispatch-forward, dispatch-backward, combine-forward, so ranks never wait for each other in a
// circle. The weight gradient of pre_dispatch is left to the caller where `is_last_in_backward`.
void issue_layers(
    LayerPlan* forward, LayerPlan* backward, bool is_last_in_backward, const OverlapOptions& options
);

}  // namespace weft::overlap
