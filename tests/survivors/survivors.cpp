// SPDX-License-Identifier: Apache-2.0
#include "survivors/survivors.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "exchange/reference/reference_exchange.hpp"
#include "plan/reference/reference_plan.hpp"
#include "support/compare.hpp"

namespace weft::test {

struct SurvivorRounds::Inputs {
  std::vector<RouteTable> tables;  // by rank
  std::vector<Matrix> x;
};

struct SurvivorRounds::Outputs {
  Matrix rows;
  Matrix weights;
  Matrix x;
};

namespace {

bool has(const std::vector<int>& ranks, size_t rank) {
  return std::ranges::find(ranks, static_cast<int>(rank)) != ranks.end();
}

Matrix floats(int64_t rows, int64_t cols, float value) {
  Matrix matrix(DType::kFloat32, rows, cols);
  std::fill_n(matrix.as<float>(), matrix.num_elements(), value);
  return matrix;
}

Matrix index_of(const RouteTable& table, IndexKind kind) {
  const bool is_wide = kind == IndexKind::kInt64;
  Matrix matrix(is_wide ? DType::kInt64 : DType::kInt32, table.num_tokens, table.topk);
  if (is_wide) {
    std::ranges::copy(table.expert, matrix.as<int64_t>());
  } else {
    std::ranges::copy(table.expert, matrix.as<int32_t>());
  }
  return matrix;
}

Matrix weights_of(const RouteTable& table) {
  Matrix matrix(DType::kFloat32, table.num_tokens, table.topk);
  std::ranges::copy(table.weight, matrix.as<float>());
  return matrix;
}

// Returns a round's rows, which are in one of two places.
Tensor rows_of(const SurvivorRounds::Round& round) {
  const Tensor& direct = round.buffer.tensor();
  return direct.is_given() ? direct : const_cast<Matrix&>(round.rows).view();
}

}  // namespace

PlanOptions SurvivorRounds::options() const {
  PlanOptions options;
  options.layout = spec_.layout;
  options.pad_multiple = spec_.pad_multiple;
  options.order = spec_.order;
  options.balance = spec_.balance;
  return options;
}

bool SurvivorRounds::has_copy(int32_t expert, const std::vector<int>& alive) const {
  const std::vector<int32_t>& placement = spec_.balance.placement;
  bool has_any = has(alive, static_cast<size_t>(expert / (setup_.num_experts / setup_.num_ranks)));
  for (size_t i = 0; i < placement.size(); ++i) {
    const size_t rank = i / static_cast<size_t>(spec_.balance.replicas);
    has_any = has_any || (placement[i] == expert && has(alive, rank));
  }
  return has_any;
}

SurvivorRounds::Inputs SurvivorRounds::inputs(uint64_t seed) const {
  Inputs in;
  RandomSource random(seed);
  for (int rank = 0; rank < setup_.num_ranks; ++rank) {
    const int64_t tokens = random.between(0, setup_.max_tokens);
    in.tables.push_back(random_routing(
        {.num_tokens = tokens,
         .num_experts = setup_.num_experts,
         .topk = spec_.topk,
         .hole_fraction = spec_.hole_fraction,
         .seed = seed},
        rank
    ));
    in.x.push_back(random_values(DType::kFloat32, tokens, setup_.hidden, random));
  }
  return in;
}

std::vector<Plan> SurvivorRounds::plans(const Inputs& in, const RoundReport& alive) const {
  std::vector<RouteTable> tables = in.tables;
  std::vector<int> lost;
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    if (!has(alive.plan, rank)) {
      lost.push_back(static_cast<int>(rank));
      tables[rank].num_tokens = 0;
      tables[rank].expert.clear();
      tables[rank].weight.clear();
    }
    for (int32_t& expert : tables[rank].expert) {
      expert = expert >= 0 && has_copy(expert, alive.plan) ? expert : -1;
    }
  }
  std::vector<Plan> plans;
  for (PlanData& plan :
       reference_plans(tables, setup_.num_experts, options(), {}, setup_.domain_of, lost)) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  return plans;
}

SurvivorRounds::Outputs SurvivorRounds::expected(
    const std::vector<Plan>& plans, Inputs in, const RoundReport& alive, size_t rank
) const {
  std::vector<Outputs> out(plans.size());
  std::vector<Matrix> weights;
  std::vector<DispatchInput> dispatched;
  std::vector<DispatchOutput> rows;
  std::vector<CombineInput> combined;
  std::vector<CombineOutput> sums;
  for (size_t r = 0; r < plans.size(); ++r) {
    const int64_t tokens = plans[r].num_tokens();
    const bool is_lost = !has(alive.dispatch, r);
    in.x[r] = is_lost ? floats(tokens, setup_.hidden, 0) : std::move(in.x[r]);
    weights.push_back(is_lost ? floats(tokens, spec_.topk, 0) : weights_of(in.tables[r]));
    out[r].rows = Matrix(DType::kFloat32, plans[r].num_rows(), setup_.hidden);
    out[r].weights = Matrix(DType::kFloat32, plans[r].num_rows(), plans[r].row_weight_cols());
    out[r].x = Matrix(DType::kFloat32, tokens, setup_.hidden);
  }
  for (size_t r = 0; r < plans.size(); ++r) {
    dispatched.push_back({in.x[r].view(), weights[r].view()});
    rows.push_back({out[r].rows.view(), out[r].weights.view()});
  }
  reference_dispatch(plans, dispatched, rows);
  std::vector<Matrix> held;
  for (size_t r = 0; r < plans.size(); ++r) {
    held.push_back(
        has(alive.combine, r) ? out[r].rows : floats(plans[r].num_rows(), setup_.hidden, -0.0F)
    );
  }
  for (size_t r = 0; r < plans.size(); ++r) {
    combined.push_back({.rows = std::as_const(held[r]).view()});
    sums.push_back({.x = out[r].x.view()});
  }
  // A plan of other members forwards nothing any more, as in one domain.
  const bool is_one_domain = alive.combine != alive.plan;
  reference_combine(
      plans, combined, sums, is_one_domain ? std::span<const int>() : setup_.domain_of
  );
  // A token without any row left is zero, not -0.
  const auto hidden = static_cast<size_t>(setup_.hidden);
  const auto topk = static_cast<size_t>(spec_.topk);
  const int per_rank = plans[rank].num_local_experts();
  for (size_t token = 0; token < out[rank].x.num_elements() / hidden; ++token) {
    const auto* experts = contents_of(plans[rank]).route_expert.data() + token * topk;
    const bool has_row = std::any_of(experts, experts + topk, [&](int32_t expert) {
      return expert >= 0 && has(alive.combine, static_cast<size_t>(expert / per_rank));
    });
    if (!has_row) {
      std::fill_n(out[rank].x.as<float>() + token * hidden, hidden, 0.0F);
    }
  }
  return std::move(out[rank]);
}

SurvivorRounds::Round SurvivorRounds::call(
    Exchange& exchange, uint64_t seed, const std::function<void(int call)>& at
) const {
  const auto rank = static_cast<size_t>(exchange.rank());
  const Inputs in = inputs(seed);
  const RouteTable& table = in.tables[rank];
  const Matrix idx = index_of(table, spec_.index);
  const Matrix weights = weights_of(table);
  Round round;
  round.seed = seed;
  at(0);
  round.plan = exchange.plan({.topk_idx = idx.view(), .weights = weights.view()}, options());
  const Plan& plan = *round.plan;
  round.alive.plan = exchange.report().alive;
  if (spec_.output == OutputMemory::kDirect || seed % 2 == 0) {
    round.buffer = exchange.allocate(plan.num_rows(), setup_.hidden, DType::kFloat32);
    fill_canary(round.buffer.tensor());
  } else {
    round.rows = Matrix(DType::kFloat32, plan.num_rows(), setup_.hidden);
  }
  round.weights = Matrix(DType::kFloat32, plan.num_rows(), plan.row_weight_cols());
  round.x = Matrix(DType::kFloat32, plan.num_tokens(), setup_.hidden);
  DispatchOutput output = {.rows = rows_of(round), .weights = round.weights.view()};
  if (spec_.layout != Layout::kRankMajor) {
    round.count_sums = Matrix(DType::kInt32, 1, plan.num_local_experts());
    std::fill_n(round.count_sums.as<int32_t>(), round.count_sums.num_elements(), 0);
    output.count_sums = round.count_sums.view();
  }
  at(1);
  exchange.dispatch(plan, {.x = in.x[rank].view(), .weights = weights.view()}, output);
  round.alive.dispatch = exchange.report().alive;
  at(2);
  exchange.combine(plan, {.rows = rows_of(round)}, {.x = round.x.view()});
  const CallReport report = exchange.report();
  round.alive.combine = report.alive;
  round.lost_experts = report.lost_experts;
  at(3);
  return round;
}

std::string SurvivorRounds::problem_of(const Round& round, int rank) const {
  const auto at = static_cast<size_t>(rank);
  const Inputs in = inputs(round.seed);
  const std::vector<Plan> wanted = plans(in, round.alive);
  const Outputs right = expected(wanted, in, round.alive, at);
  std::string problem = first_difference(*round.plan, wanted[at]);
  const auto compare = [&](std::string_view what, ConstTensor actual, const Matrix& expect) {
    problem = problem.empty() ? first_difference(what, actual, expect.view()) : problem;
  };
  compare("dispatch: rows", rows_of(round), right.rows);
  compare("dispatch: weights", round.weights.view(), right.weights);
  compare("combine: x", round.x.view(), right.x);
  const std::span counts = round.plan->rows_per_expert();
  const std::span sums(round.count_sums.as<int32_t>(), round.count_sums.num_elements());
  if (spec_.layout != Layout::kRankMajor && !std::ranges::equal(sums, counts)) {
    problem += "dispatch: count_sums are not those of one call";
  }
  std::vector<int> lost_experts;
  for (int expert = 0; expert < setup_.num_experts; ++expert) {
    if (!has_copy(expert, round.alive.combine)) {
      lost_experts.push_back(expert);
    }
  }
  if (round.lost_experts != lost_experts) {
    problem += fmt::format(
        "lost experts {}, not {}", fmt::join(round.lost_experts, ","), fmt::join(lost_experts, ",")
    );
  }
  return problem.empty() ? problem
                         : fmt::format(
                               "rank {}, seed {}, alive {} / {} / {}: {}",
                               rank,
                               round.seed,
                               fmt::join(round.alive.plan, ","),
                               fmt::join(round.alive.dispatch, ","),
                               fmt::join(round.alive.combine, ","),
                               problem
                           );
}

std::string SurvivorRounds::run(
    Exchange& exchange, uint64_t seed, const std::function<void(int call)>& at
) const {
  return problem_of(call(exchange, seed, at), exchange.rank());
}

}  // namespace weft::test
