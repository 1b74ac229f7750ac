// SPDX-License-Identifier: Apache-2.0
// Checks of arguments for the calls of weft/compat that are one call of the core. checks_py.cpp has
// the rules, and the other checks.
#pragma once

#include <cstdint>

#include "tensors_py.hpp"
#include "weft/plan.hpp"

namespace weft::py {

// Checks topk_idx, topk_weights (or None) and x's rows. Returns K. Raises BadCall, as all here.
int64_t check_routing(nb::handle topk_idx, nb::handle topk_weights, int64_t num_tokens);
void check_experts(int64_t num_experts, int64_t num_ranks);
// The layout of `get_dispatch_layout` is given back: per_rank, per_host, per_expert,
// is_token_in_rank. Returns E.
[[nodiscard]] int64_t check_layout(
    const nb::tuple& layout, int64_t num_tokens, int64_t num_ranks, int64_t num_hosts
);

struct BlockSizes {
  int64_t num_max;  // tokens of a rank
  int64_t num_experts;
  int64_t num_ranks;  // of num_max rows each in a block
};

// Sizes and options that the arguments of low_latency_dispatch make.
struct BlockDispatch {
  int64_t hidden;
  int64_t topk;
  Options options;
};

// Checks the tensors of low_latency_dispatch (x, topk_idx, topk_weights, statistics of counts and
// of waits, and x_global_scale), its sizes, and its formats (use_fp8, round_scale, use_ue8m0,
// use_nvfp4, use_mxfp8, use_ue8m0_for_sf).
[[nodiscard]] BlockDispatch check_block_dispatch(
    const nb::tuple& tensors, const BlockSizes& sizes, const nb::tuple& formats
);

// Checks the tensors of low_latency_combine: x, topk_idx, topk_weights, out, and statistics of
// waits. `hidden` and `stride`: of the plan's rows and blocks.
void check_block_combine(
    const nb::tuple& tensors, const Plan& plan, int64_t stride, int64_t hidden
);

}  // namespace weft::py
