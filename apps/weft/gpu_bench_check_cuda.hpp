// SPDX-License-Identifier: Apache-2.0
// Whether rows and sums that `weft bench` left on a GPU are right: a sample of them, every element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/plan.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// Of the rows that a rank's tokens and its experts have, for launch_fill.
[[nodiscard]] uint64_t token_seed(int rank);
[[nodiscard]] uint64_t expert_seed(int rank);

// rows: what `rank` got of tokens made from their seeds, in bf16; plans: those of all ranks.
[[nodiscard]] bool rows_are_right(const Tensor& rows, const std::vector<Plan>& plans, size_t rank);
// sums: what combine made of experts' rows made from their seeds, in bf16; plan: of this rank.
[[nodiscard]] bool sums_are_right(const Tensor& sums, const Plan& plan);

}  // namespace weft::program
