// SPDX-License-Identifier: Apache-2.0
#include "support/case_data.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <limits>
#include <utility>

#include "call/quantise.hpp"
#include "call/scale_layout.hpp"
#include "core/half.hpp"
#include "plan/balance/balance.hpp"
#include "plan/reference/reference_plan.hpp"
#include "plan/without.hpp"
#include "support/fp8.hpp"
#include "support/stored_rows.hpp"

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

// `num_experts`: holes are values that none of them has; 0: they are -1.
template <class Index>
Matrix index_matrix(const RouteTable& table, DType dtype, Index num_experts) {
  using Limits = std::numeric_limits<Index>;
  const Index unknown[] = {-5, num_experts, Limits::min(), -1, Limits::max(), Limits::max() / 2};
  Matrix matrix(dtype, table.num_tokens, table.topk);
  for (size_t i = 0; i < table.expert.size(); ++i) {
    const bool is_unknown = table.expert[i] < 0 && num_experts > 0;
    matrix.as<Index>()[i] = is_unknown ? unknown[i % std::size(unknown)] : table.expert[i];
  }
  return matrix;
}

// Returns the choices as a map; `table` becomes what the plan makes of it: set experts, ascending.
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
  routing.ignores_unknown = spec.ignores_unknown;
  const int num_experts = spec.ignores_unknown ? setup.num_experts : 0;
  routing.topk_idx = spec.index == IndexKind::kInt32
                         ? index_matrix<int32_t>(table, DType::kInt32, num_experts)
                         : index_matrix<int64_t>(table, DType::kInt64, num_experts);
  if (table.has_weights) {
    routing.weights = Matrix(DType::kFloat32, table.num_tokens, table.topk);
    std::copy(table.weight.begin(), table.weight.end(), routing.weights.as<float>());
  }
  return routing;
}

// Drops the routes to experts that only lost ranks have.
void drop_lost(const ExchangeSetup& setup, const Case& spec, RouteTable& table) {
  const PhysicalExperts shape = {setup.num_ranks, setup.num_experts, spec.balance.replicas};
  drop_routes_to(experts_without_copy(shape, spec.balance.placement, spec.lost), table);
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
  options.order = data.spec.order;
  options.balance = data.spec.balance;
  const std::vector<int>& domain_of = data.setup.domain_of;
  std::vector<int64_t> budgets(tables.size(), -1);
  if (data.spec.rows >= 0 && options.layout == Layout::kExpertStrided) {
    options.expert_stride = data.spec.rows;
  } else if (data.spec.rows >= 0) {
    std::fill(budgets.begin(), budgets.end(), data.spec.rows);
  } else if (data.spec.room != Room::kExact) {
    const auto exact = reference_plans(tables, num_experts, options, {}, domain_of, data.spec.lost);
    if (options.layout == Layout::kExpertStrided) {
      const int64_t stride = exact[0].shape.options.expert_stride;
      options.expert_stride = std::max<int64_t>(1, with_room(data.spec.room, stride, random));
    } else {
      for (size_t rank = 0; rank < tables.size(); ++rank) {
        budgets[rank] = with_room(data.spec.room, exact[rank].required_rows, random);
      }
    }
  }
  const std::vector<int>& lost = data.spec.lost;
  for (PlanData& plan : reference_plans(tables, num_experts, options, budgets, domain_of, lost)) {
    data.plans.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  for (size_t rank = 0; rank < tables.size(); ++rank) {
    data.routing[rank].options = options;
    if (budgets[rank] >= 0) {
      data.routing[rank].options.row_budget = budgets[rank];
    }
  }
}

// The first groups are zeros, less than what a clamped scale begins with, and such that the scale
// is a power of two by itself. Of formats that say what becomes of them, the next have an infinity
// and a NaN, and one the least numbers that there are.
Matrix values_to_quantise(
    int64_t rows, int64_t cols, Quantise kind, ScaleRule rule, RandomSource& random
) {
  Matrix x = random_values(DType::kBFloat16, rows, cols, random);  // below 2^20
  const bool is_block = kind == Quantise::kMxfp8 || kind == Quantise::kNvfp4;
  const float last = fp8_to_float(num_finite_fp8(is_block ? Quantise::kE4M3 : kind) - 1, kind);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float factors[] = {0, 0x1p-40F, 0x1p-20F, 1, 1, 0x1p-148F};
  const float firsts[] = {0, 0, last, -kInfinity, std::nanf(""), 0x1p-133F};
  const auto size = static_cast<size_t>(stored_format(kind, rule).group);
  for (size_t group = 0; group < (is_block ? std::size(factors) : 3); ++group) {
    for (size_t i = 0; i < size && group * size < x.num_elements(); ++i) {
      uint16_t& value = x.as<uint16_t>()[group * size + i];
      const bool is_first = group >= 2 && i == 0;
      value = float_to_bf16(is_first ? firsts[group] : bf16_to_float(value) * factors[group]);
    }
  }
  return x;
}

// A place for what is beside the rows.
void ask_beside(const Plan& plan, ScaleLayout layout, RankCall& call) {
  call.sources = Matrix(DType::kInt32, plan.num_rows(), 2);
  if (plan.layout() == Layout::kRankMajor) {
    call.experts = Matrix(DType::kInt64, plan.num_rows(), plan.topk());
  } else {
    call.counts = Matrix(DType::kInt32, 1, plan.num_local_experts());
    call.count_sums = call.counts;
  }
  const ConstTensor scales = std::as_const(call.row_scales).view();
  if (plan.layout() == Layout::kExpertStrided && scales.is_given() && scales.row_bytes() % 4 == 0) {
    call.scale_layout = layout;
    const int64_t stride = plan.num_rows() / plan.num_local_experts();
    const int64_t rows = num_scale_rows(layout, plan.num_rows(), stride);
    call.row_scales = Matrix(scales.dtype, rows, scales.cols);
  }
}

std::vector<RankCall> make_dispatch(const CaseData& data, RandomSource& random) {
  const Case& spec = data.spec;
  const int64_t cols = spec.dtype == DType::kByte ? spec.byte_cols : data.setup.hidden;
  const int64_t weight_cols = num_routing_cols(data.setup, spec);
  const Quantise quantise = quantise_of(data.setup, spec);
  std::vector<RankCall> calls;
  std::vector<DispatchInput> in;
  std::vector<DispatchOutput> out;
  std::deque<StoredRows> stored;  // instead of x
  for (const Plan& plan : data.plans) {
    RankCall& call = calls.emplace_back();
    if (quantise == Quantise::kNone) {
      call.x = random_bits(spec.dtype, plan.num_tokens(), cols, random);
      call.rows = Matrix(spec.dtype, plan.num_rows(), cols);
    } else {
      call.x = values_to_quantise(plan.num_tokens(), cols, quantise, spec.scale_rule, random);
      stored.push_back(quantised(call.x, spec, quantise));
      const ConstTensor scales = std::as_const(stored.back().scales).view();
      call.rows =
          Matrix(DType::kByte, plan.num_rows(), std::as_const(stored.back().rows).view().cols);
      if (quantise == Quantise::kNvfp4 && spec.global_scale > 0) {
        call.global_scale = Matrix(DType::kFloat32, 1, 1);
        *call.global_scale.as<float>() = spec.global_scale;
      }
      call.row_scales = Matrix(scales.dtype, plan.num_rows(), scales.cols);
    }
    if (spec.has_weights) {
      call.weights = random_bits(DType::kFloat32, plan.num_tokens(), weight_cols, random);
      call.row_weights = Matrix(DType::kFloat32, plan.num_rows(), plan.row_weight_cols());
    }
    if (spec.scale_cols > 0 && stored.empty()) {
      call.scales = random_bits(DType::kByte, plan.num_tokens(), spec.scale_cols, random);
      call.row_scales = Matrix(DType::kByte, plan.num_rows(), spec.scale_cols);
    }
    if (spec.asks_beside) {
      ask_beside(plan, spec.scale_layout, call);
    }
  }
  for (RankCall& call : calls) {
    DispatchInput input = call.dispatch_input();
    if (!stored.empty()) {
      const StoredRows& given = stored[in.size()];
      input = {given.rows.view(), call.weights.view(), given.scales.view()};
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
      if (spec.skips_source_weights) {
        call.source_idx = Matrix(DType::kInt64, plan.num_tokens(), weight_cols);
        for (size_t i = 0; i < call.source_idx.num_elements(); ++i) {
          const int32_t physical = contents_of(plan).route_expert[i];
          const int64_t chosen = physical < 0 ? -1 : expert_of(contents_of(plan).shape, physical);
          const int64_t none = random.between(-5, 9);  // what is not negative names no expert here
          const bool is_left_out = none < 0 || none == 9;
          call.source_idx.as<int64_t>()[i] = !is_left_out ? chosen
                                             : none < 0   ? none
                                                          : plan.num_experts() + none;
        }
      }
    }
  }
  for (RankCall& call : calls) {
    in.push_back(call.combine_input(spec.scale, wire_of(data.setup, spec)));
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
    drop_lost(setup, spec, tables.back());
  }
  make_plans(data, tables, random);
  for (const char call : spec.calls) {
    data.calls.push_back(call == 'd' ? make_dispatch(data, random) : make_combine(data, random));
  }
  return data;
}

}  // namespace weft::test
