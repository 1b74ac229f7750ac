// SPDX-License-Identifier: Apache-2.0
// What low-latency calls of weft/compat ask of their arguments, for those that are one call of the
// core. checks_py.cpp has the rules, and the others.
#pragma once

#include <cstdint>

#include "tensors_py.hpp"
#include "weft/plan.hpp"

namespace weft::py {

struct BlockSizes {
  int64_t num_max;  // tokens of a rank
  int64_t num_experts;
  int64_t num_ranks;  // of num_max rows each in a block
};

// What the arguments of low_latency_dispatch make.
struct BlockDispatch {
  int64_t hidden;
  int64_t topk;
  Options options;
};

// Of its tensors (x, topk_idx, topk_weights, statistics of counts and of waits, and
// x_global_scale), sizes, and formats (use_fp8, round_scale, use_ue8m0, use_nvfp4, use_mxfp8,
// use_ue8m0_for_sf). Raises BadCall.
[[nodiscard]] BlockDispatch check_block_dispatch(
    const nb::tuple& tensors, const BlockSizes& sizes, const nb::tuple& formats
);

// What low_latency_combine asks of its tensors: x, topk_idx, topk_weights, out, and statistics of
// waits. `hidden` and `stride`: of the plan's rows and blocks. Raises BadCall.
void check_block_combine(
    const nb::tuple& tensors, const Plan& plan, int64_t stride, int64_t hidden
);

}  // namespace weft::py
