// SPDX-License-Identifier: Apache-2.0
// Is the rival honest? Sampled rows of its results against what the host expects.
#pragma once

#include <span>

#include "nccl/nccl_rival_cuda.hpp"

namespace weft::bench {

// Each runs one operation on patterns and compares every bit of some rows of each rank, padding
// rows included.
[[nodiscard]] bool is_dispatch_right(
    NcclRival& rival, const RivalPlan& plan, std::span<const RouteTable> routes
);
[[nodiscard]] bool is_combine_right(
    NcclRival& rival, const RivalPlan& plan, std::span<const RouteTable> routes
);

}  // namespace weft::bench
