// SPDX-License-Identifier: Apache-2.0
#include "support/case_data.hpp"

#include <algorithm>
#include <cmath>
#include <deque>

#include "core/half.hpp"
#include "plan/reference/reference_plan.hpp"
#include "support/fp8.hpp"

namespace weft::test {
namespace {

int num_routing_cols(const ExchangeSetup& setup, const Case& spec) {
  return spec.index == IndexKind::kMap ? setup.num_experts : spec.topk;
}

RouteTable draw_routes(const ExchangeSetup& setup, const Case& spec, int rank) {
  RouteTable table = random_routing(
      {.num_tokens = spec.num_tokens[static_cast<size_t>(rank)],
       .num_experts = setup.num_experts,
       .topk = spec.topk,
       .popularity = spec.popularity,
       .hole_fraction = spec.hole_fraction,
       .repeat_experts = spec.repeat_experts,
       .with_weights = spec.has_plan_weights,
       .seed = spec.seed},
      rank
  );
  for (size_t i = 0; i < table.expert.size() && !spec.experts.empty(); ++i) {
    table.expert[i] = spec.experts[i % spec.experts.size()];
  }
  return table;
}

template <class Index>
Matrix index_matrix(const RouteTable& table, DType dtype) {
  Matrix matrix(dtype, table.num_tokens, table.topk);
  std::copy(table.expert.begin(), table.expert.end(), matrix.as<Index>());
  return matrix;
}

// The same choices as a map; the table is what the plan makes of it: set experts, ascending.
RankRouting routing_by_map(const ExchangeSetup& setup, RouteTable& table) {
  RankRouting routing;
  const auto experts = static_cast<size_t>(setup.num_experts);
  routing.map = Matrix(DType::kBool, table.num_tokens, setup.num_experts);
  auto* map = routing.map.as<bool>();
  std::fill_n(map, routing.map.num_elements(), false);
  if (table.has_weights) {
    routing.weights = Matrix(DType::kFloat32, table.num_tokens, setup.num_experts);
    std::fill_n(routing.weights.as<float>(), routing.weights.num_elements(), -3.0F);
  }
  RouteTable by_map;
  by_map.num_tokens = table.num_tokens;
  by_map.topk = setup.max_topk;
  by_map.from_map = true;
  by_map.has_weights = table.has_weights;
  const auto topk = static_cast<size_t>(table.topk);
  for (size_t token = 0; token < static_cast<size_t>(table.num_tokens); ++token) {
    for (size_t k = 0; k < topk; ++k) {
      const int32_t expert = table.expert[token * topk + k];
      if (expert >= 0) {
        map[token * experts + static_cast<size_t>(expert)] = true;
        if (table.has_weights) {
          routing.weights.as<float>()[token * experts + static_cast<size_t>(expert)] =
              table.weight[token * topk + k];
        }
      }
    }
    int num_set = 0;
    for (size_t expert = 0; expert < experts; ++expert) {
      if (map[token * experts + expert]) {
        by_map.expert.push_back(static_cast<int32_t>(expert));
        if (table.has_weights) {
          by_map.weight.push_back(routing.weights.as<float>()[token * experts + expert]);
        }
        ++num_set;
      }
    }
    for (; num_set < setup.max_topk; ++num_set) {
      by_map.expert.push_back(-1);
      if (table.has_weights) {
        by_map.weight.push_back(0);
      }
    }
  }
  table = std::move(by_map);
  return routing;
}

RankRouting make_routing(const ExchangeSetup& setup, const Case& spec, RouteTable& table) {
  if (spec.index == IndexKind::kMap) {
    return routing_by_map(setup, table);
  }
  RankRouting routing;
  routing.topk_idx = spec.index == IndexKind::kInt32 ? index_matrix<int32_t>(table, DType::kInt32)
                                                     : index_matrix<int64_t>(table, DType::kInt64);
  if (table.has_weights) {
    routing.weights = Matrix(DType::kFloat32, table.num_tokens, table.topk);
    std::copy(table.weight.begin(), table.weight.end(), routing.weights.as<float>());
  }
  return routing;
}

// Rows that a rank gets instead of what it needs.
int64_t with_room(Room room, int64_t required, RandomSource& random) {
  switch (room) {
    case Room::kExact:
      return required;
    case Room::kSpare:
      return required + random.between(1, 9);
    case Room::kOneRowShort:
      return std::max<int64_t>(required - 1, 0);
    case Room::kRandom:
      return random.between(0, required + 3);
  }
  return required;
}

void make_plans(CaseData& data, std::span<const RouteTable> tables, RandomSource& random) {
  const int num_experts = data.setup.num_experts;
  PlanOptions options;
  options.layout = data.spec.layout;
  options.pad_multiple = data.spec.pad_multiple;
  std::vector<int64_t> budgets(tables.size(), -1);
  if (data.spec.rows >= 0 && options.layout == Layout::kExpertStrided) {
    options.expert_stride = data.spec.rows;
  } else if (data.spec.rows >= 0) {
    std::fill(budgets.begin(), budgets.end(), data.spec.rows);
  } else if (data.spec.room != Room::kExact) {
    const auto exact = reference_plans(tables, num_experts, options);
    if (options.layout == Layout::kExpertStrided) {
      const int64_t stride = exact[0].shape.options.expert_stride;
      options.expert_stride = std::max<int64_t>(1, with_room(data.spec.room, stride, random));
    } else {
      for (size_t rank = 0; rank < tables.size(); ++rank) {
        budgets[rank] = with_room(data.spec.room, exact[rank].required_rows, random);
      }
    }
  }
  for (PlanData& plan : reference_plans(tables, num_experts, options, budgets)) {
    data.plans.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    data.routing[rank].options = options;
    if (budgets[rank] >= 0) {
      data.routing[rank].options.row_budget = budgets[rank];
    }
  }
}

// What dispatch stores of bf16 rows, by the rule in the words of include/weft/calls.hpp.
struct Fp8Rows {
  Matrix rows;
  Matrix scales;
};

Fp8Rows quantised(const Matrix& x, Quantise kind) {
  const ConstTensor view = x.view();
  Fp8Rows out = {
      Matrix(DType::kByte, view.rows, view.cols),
      Matrix(DType::kFloat32, view.rows, view.cols / kQuantiseGroup)};
  const float last = fp8_to_float(num_finite_fp8(kind) - 1, kind);
  for (size_t first = 0; first < x.num_elements(); first += kQuantiseGroup) {
    const auto value = [&](size_t i) { return bf16_to_float(x.as<uint16_t>()[first + i]); };
    float largest = 0;
    for (size_t i = 0; i < kQuantiseGroup; ++i) {
      largest = std::max(largest, std::fabs(value(i)));
    }
    const float scale = largest > 0 ? largest / last : 1;
    out.scales.as<float>()[first / kQuantiseGroup] = scale;
    for (size_t i = 0; i < kQuantiseGroup; ++i) {
      out.rows.as<uint8_t>()[first + i] = nearest_fp8(value(i) / scale, kind);
    }
  }
  return out;
}

// Finite, the first group zeros.
Matrix values_to_quantise(int64_t rows, int64_t cols, RandomSource& random) {
  Matrix x = random_values(DType::kBFloat16, rows, cols, random);
  std::fill_n(x.as<uint16_t>(), rows > 0 ? kQuantiseGroup : 0, uint16_t{0});
  return x;
}

std::vector<RankCall> make_dispatch(const CaseData& data, RandomSource& random) {
  const Case& spec = data.spec;
  const int64_t cols = spec.dtype == DType::kByte ? spec.byte_cols : data.setup.hidden;
  const int64_t weight_cols = num_routing_cols(data.setup, spec);
  std::vector<RankCall> calls;
  std::vector<DispatchInput> in;
  std::vector<DispatchOutput> out;
  std::deque<Fp8Rows> stored;  // instead of x
  for (const Plan& plan : data.plans) {
    RankCall& call = calls.emplace_back();
    if (spec.quantise == Quantise::kNone) {
      call.x = random_bits(spec.dtype, plan.num_tokens(), cols, random);
      call.rows = Matrix(spec.dtype, plan.num_rows(), cols);
    } else {
      call.x = values_to_quantise(plan.num_tokens(), cols, random);
      call.rows = Matrix(DType::kByte, plan.num_rows(), cols);
      call.row_scales = Matrix(DType::kFloat32, plan.num_rows(), cols / kQuantiseGroup);
      stored.push_back(quantised(call.x, spec.quantise));
    }
    if (spec.has_weights) {
      call.weights = random_bits(DType::kFloat32, plan.num_tokens(), weight_cols, random);
      call.row_weights = Matrix(DType::kFloat32, plan.num_rows(), plan.row_weight_cols());
    }
    if (spec.scale_cols > 0 && stored.empty()) {
      call.scales = random_bits(DType::kByte, plan.num_tokens(), spec.scale_cols, random);
      call.row_scales = Matrix(DType::kByte, plan.num_rows(), spec.scale_cols);
    }
  }
  for (RankCall& call : calls) {
    DispatchInput input = call.dispatch_input();
    if (!stored.empty()) {
      const Fp8Rows& fp8 = stored[in.size()];
      input = {fp8.rows.view(), call.weights.view(), fp8.scales.view()};
    }
    in.push_back(input);
    out.push_back(call.dispatch_output());
  }
  reference_dispatch(data.plans, in, out);
  return calls;
}

std::vector<RankCall> make_combine(const CaseData& data, RandomSource& random) {
  const Case& spec = data.spec;
  const int64_t weight_cols = num_routing_cols(data.setup, spec);
  std::vector<RankCall> calls;
  std::vector<CombineInput> in;
  std::vector<CombineOutput> out;
  for (const Plan& plan : data.plans) {
    RankCall& call = calls.emplace_back();
    call.rows = random_values(spec.dtype, plan.num_rows(), data.setup.hidden, random);
    call.x = Matrix(spec.dtype, plan.num_tokens(), data.setup.hidden);
    if (spec.has_weights) {
      call.row_weights =
          random_bits(DType::kFloat32, plan.num_rows(), plan.row_weight_cols(), random);
      call.weights = Matrix(DType::kFloat32, plan.num_tokens(), weight_cols);
    }
    if (spec.scale == CombineScale::kSourceWeights) {
      call.source_weights = random_values(DType::kFloat32, plan.num_tokens(), weight_cols, random);
    }
  }
  for (RankCall& call : calls) {
    in.push_back(call.combine_input(spec.scale));
    out.push_back(call.combine_output());
  }
  reference_combine(data.plans, in, out, data.setup.domain_of);
  return calls;
}

}  // namespace

CaseData make_case_data(const ExchangeSetup& setup, const Case& spec) {
  CaseData data = {.setup = setup, .spec = spec, .routing = {}, .plans = {}, .calls = {}};
  RandomSource random(~spec.seed);
  std::vector<RouteTable> tables;
  for (int rank = 0; rank < setup.num_ranks; ++rank) {
    tables.push_back(draw_routes(setup, spec, rank));
    data.routing.push_back(make_routing(setup, spec, tables.back()));
  }
  make_plans(data, tables, random);
  for (const char call : spec.calls) {
    data.calls.push_back(call == 'd' ? make_dispatch(data, random) : make_combine(data, random));
  }
  return data;
}

}  // namespace weft::test
