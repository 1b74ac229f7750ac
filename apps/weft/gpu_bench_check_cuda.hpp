// SPDX-License-Identifier: Apache-2.0
// Whether rows and sums that `weft bench` left on a GPU are right: a sample of them, every element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/plan.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// Of what a rank's tokens, their scales and its experts' rows are filled with by launch_fill.
[[nodiscard]] uint64_t token_seed(int rank);
[[nodiscard]] uint64_t scale_seed(int rank);
[[nodiscard]] uint64_t expert_seed(int rank);

// rows: what `rank` got of rows that each source filled from seed_of(source), seen as bf16 of
// whatever they are; plans: those of all ranks.
[[nodiscard]] bool rows_are_right(
    const Tensor& rows, const std::vector<Plan>& plans, size_t rank, uint64_t (*seed_of)(int source)
);
// sums: what combine made of experts' rows made from their seeds, in bf16; plan: of this rank.
[[nodiscard]] bool sums_are_right(const Tensor& sums, const Plan& plan);

}  // namespace weft::program
