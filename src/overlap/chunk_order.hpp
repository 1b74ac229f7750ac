// SPDX-License-Identifier: Apache-2.0
// The forward of one chunk woven into the backward of another.
#pragma once

#include "overlap/chunk_plan.hpp"
#include "overlap/layer_order.hpp"

namespace weft::overlap {

// Issues both chunks; either may be null. Layer i of the forward meets layer last - i of the
// backward; what one chunk has more comes alone, backward before forward.
void issue_chunks(ChunkPlan* forward, ChunkPlan* backward, const OverlapOptions& options);

}  // namespace weft::overlap
