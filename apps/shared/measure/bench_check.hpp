// SPDX-License-Identifier: Apache-2.0
// Proof that what is timed is right: outputs of all ranks against the slow reference. Only one rank
// computes the reference, and only fingerprints travel, so that large cases fit into memory.
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

// A number that two equal matrices share.
[[nodiscard]] uint64_t fingerprint(const ConstTensor& matrix);

// Inputs that every rank can make for any other.
[[nodiscard]] Matrix bench_tokens(DType dtype, int64_t rows, int64_t cols, uint64_t seed, int rank);
[[nodiscard]] Matrix bench_rows(DType dtype, int64_t rows, int64_t cols, uint64_t seed, int rank);

struct OutputPrints {
  uint64_t rows = 0;  // of dispatch from bench_tokens
  uint64_t x = 0;     // of combine from bench_rows
};

struct Verdict {
  bool is_plan_good = false;
  bool is_dispatch_good = false;
  bool is_combine_good = false;
};

// Collective. Good where every rank says so.
[[nodiscard]] Verdict verdict_of_all(const Group& group, const Verdict& mine);

struct BenchShape {
  std::span<const RouteTable> routes;  // by rank
  int num_experts = 0;
  PlanOptions options = {};
  DType dtype = DType::kBFloat16;
  int64_t hidden = 0;
  uint64_t seed = 0;
};

// Collective. This rank's plan and fingerprints; the verdict is about all ranks.
[[nodiscard]] Verdict judge(
    const Group& group, const BenchShape& shape, const Plan& plan, const OutputPrints& prints
);

}  // namespace weft::program
