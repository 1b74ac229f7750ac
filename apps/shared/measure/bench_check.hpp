// SPDX-License-Identifier: Apache-2.0
// Proof that what is timed is right: plans against the slow reference, rows and sums against
// made-up elements, which every rank computes from a seed. No rank holds another rank's rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "measure/workload.hpp"
#include "plan/build.hpp"
#include "weft/group.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// The plans of all ranks, by the slow reference; `budgets` as reference_plans() takes them.
[[nodiscard]] std::vector<Plan> expected_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> budgets = {}
);

// Rows of 16-bit or 32-bit floats that follow from a seed, the rank and where an element stands.
struct MadeUpRows {
  uint64_t seed = 0;

  // Fills a rank's matrix, on a CPU or a GPU.
  void fill(const Tensor& rows, int rank) const;
};

// rows: what `rank` got from dispatch of `made_up` rows; plans: those of all ranks. Looks at every
// element of at most `num_samples` arrivals from each source, in even steps.
[[nodiscard]] bool rows_are_right(
    const Tensor& rows,
    std::span<const Plan> plans,
    size_t rank,
    const MadeUpRows& made_up,
    int64_t num_samples
);
// sums: what combine made of the `made_up` rows of all experts, likewise; plan: of this rank.
[[nodiscard]] bool sums_are_right(
    const Tensor& sums,
    const Plan& plan,
    std::span<const int> domain_of,
    const MadeUpRows& made_up,
    int64_t num_samples
);

struct Verdict {
  bool is_plan_good = false;
  bool is_dispatch_good = false;
  bool is_combine_good = false;
};

// Collective. Good where every rank says so.
[[nodiscard]] Verdict verdict_of_all(const Group& group, const Verdict& mine);

}  // namespace weft::program
