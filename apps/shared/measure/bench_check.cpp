// SPDX-License-Identifier: Apache-2.0
#include "measure/bench_check.hpp"

#include <cstring>
#include <memory>

#include "exchange/reference/reference_exchange.hpp"
#include "measure/measure.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft::program {
namespace {

struct RankVerdict {
  OutputPrints prints;
  bool is_plan_good = false;
};

// What all ranks get where each gives what `fill` makes.
template <class Input, class Output, class Fill, class Reference>
std::vector<uint64_t> expected_prints(
    const BenchShape& shape,
    std::span<const Plan> plans,
    const Fill& fill,
    int64_t (Plan::*rows_in)() const,
    int64_t (Plan::*rows_out)() const,
    const Reference& reference
) {
  std::vector<Matrix> given;
  std::vector<Matrix> made;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  for (const Plan& plan : plans) {
    given.push_back(fill(shape.dtype, (plan.*rows_in)(), shape.hidden, shape.seed, plan.rank()));
    inputs.push_back({given.back().view()});
    made.emplace_back(shape.dtype, (plan.*rows_out)(), shape.hidden);
    outputs.push_back({made.back().view()});
  }
  reference(inputs, outputs);
  std::vector<uint64_t> prints;
  for (const Matrix& matrix : made) {
    prints.push_back(fingerprint(matrix.view()));
  }
  return prints;
}

}  // namespace

std::vector<Plan> expected_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> budgets
) {
  std::vector<Plan> plans;
  for (PlanData& data : reference_plans(routes, num_experts, options, budgets)) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  return plans;
}

Verdict verdict_of_all(const Group& group, const Verdict& mine) {
  Verdict all = {true, true, true};
  for (const Verdict& one : gather(group, mine)) {
    all.is_plan_good &= one.is_plan_good;
    all.is_dispatch_good &= one.is_dispatch_good;
    all.is_combine_good &= one.is_combine_good;
  }
  return all;
}

uint64_t fingerprint(const ConstTensor& matrix) {
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t print = mix_seed(static_cast<uint64_t>(matrix.rows), static_cast<uint64_t>(matrix.cols));
  const auto num_bytes = static_cast<size_t>(matrix.num_bytes());
  for (size_t i = 0; i < num_bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, matrix.data + i, std::min(sizeof(word), num_bytes - i));
    print = (print ^ word) * kPrime;
    print ^= print >> 29;
  }
  return print;
}

Matrix bench_tokens(DType dtype, int64_t rows, int64_t cols, uint64_t seed, int rank) {
  return make_rows(dtype, rows, cols, mix_seed(seed, 2 * static_cast<uint64_t>(rank) + 1));
}

Matrix bench_rows(DType dtype, int64_t rows, int64_t cols, uint64_t seed, int rank) {
  return make_rows(dtype, rows, cols, mix_seed(seed, 2 * static_cast<uint64_t>(rank) + 2));
}

Verdict judge(
    const Group& group, const BenchShape& shape, const Plan& plan, const OutputPrints& prints
) {
  const auto plans = expected_plans(shape.routes, shape.num_experts, shape.options);
  const auto mine = static_cast<size_t>(group.rank());
  const auto verdicts = gather(group, RankVerdict{prints, plan == plans[mine]});
  Verdict verdict = {true, true, true};
  if (group.rank() == 0) {
    const auto rows = expected_prints<DispatchInput, DispatchOutput>(
        shape,
        plans,
        bench_tokens,
        &Plan::num_tokens,
        &Plan::num_rows,
        [&](const auto& in, const auto& out) { reference_dispatch(plans, in, out); }
    );
    const auto x = expected_prints<CombineInput, CombineOutput>(
        shape,
        plans,
        bench_rows,
        &Plan::num_rows,
        &Plan::num_tokens,
        [&](const auto& in, const auto& out) {
          reference_combine(plans, in, out, group.topology().domain_of);
        }
    );
    for (size_t rank = 0; rank < verdicts.size(); ++rank) {
      verdict.is_plan_good &= verdicts[rank].is_plan_good;
      verdict.is_dispatch_good &= verdicts[rank].prints.rows == rows[rank];
      verdict.is_combine_good &= verdicts[rank].prints.x == x[rank];
    }
  }
  return verdict_of_all(group, verdict);
}

}  // namespace weft::program
