// SPDX-License-Identifier: Apache-2.0
#include "exchange/reference/reference_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <tuple>
#include <vector>

#include "call/wire.hpp"
#include "core/check.hpp"
#include "core/half.hpp"
#include "plan/plan_data.hpp"

namespace weft {
namespace {

template <class Byte>
Byte* row_of(const BasicTensor<Byte>& tensor, int64_t row) {
  const int64_t stride = tensor.row_stride < 0 ? tensor.cols : tensor.row_stride;
  return tensor.data + row * stride * dtype_bytes(tensor.dtype);
}

void copy_row(const Tensor& to, int64_t to_row, const ConstTensor& from, int64_t from_row) {
  std::memcpy(row_of(to, to_row), row_of(from, from_row), static_cast<size_t>(from.row_bytes()));
}

void zero_row(const Tensor& tensor, int64_t row) {
  std::memset(row_of(tensor, row), 0, static_cast<size_t>(tensor.row_bytes()));
}

float& at(const Tensor& tensor, int64_t row, int64_t col) {
  return reinterpret_cast<float*>(row_of(tensor, row))[col];
}

float at(const ConstTensor& tensor, int64_t row, int64_t col) {
  return reinterpret_cast<const float*>(row_of(tensor, row))[col];
}

float to_float(DType dtype, uint16_t half) {
  return dtype == DType::kBFloat16 ? bf16_to_float(half) : fp16_to_float(half);
}

uint16_t to_half(DType dtype, float value) {
  return dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
}

float round_to(DType dtype, float value) {
  return dtype == DType::kFloat32 ? value : to_float(dtype, to_half(dtype, value));
}

// --- rows of fp32 ---

using Row = std::vector<float>;

Row load(const ConstTensor& tensor, int64_t row) {
  const auto* half = reinterpret_cast<const uint16_t*>(row_of(tensor, row));
  Row values;
  for (int64_t col = 0; col < tensor.cols; ++col) {
    const bool is_float = tensor.dtype == DType::kFloat32;
    values.push_back(is_float ? at(tensor, row, col) : to_float(tensor.dtype, half[col]));
  }
  return values;
}

void store(const Tensor& tensor, int64_t row, const Row& values) {
  auto* half = reinterpret_cast<uint16_t*>(row_of(tensor, row));
  for (size_t col = 0; col < values.size(); ++col) {
    if (tensor.dtype == DType::kFloat32) {
      at(tensor, row, static_cast<int64_t>(col)) = values[col];
    } else {
      half[col] = to_half(tensor.dtype, values[col]);
    }
  }
}

// Adds a term; an empty sum becomes the term.
void add(Row& sum, const Row& term) {
  for (size_t col = 0; col < term.size(); ++col) {
    if (col == sum.size()) {
      sum.push_back(term[col]);
    } else {
      sum[col] += term[col];
    }
  }
}

// Returns a sum as it travels: rounded to the dtype, or coded.
Row sent(const Row& sum, DType dtype, Wire wire) {
  Row values;
  if (wire == Wire::kNone) {
    std::ranges::transform(sum, std::back_inserter(values), [&](float value) {
      return round_to(dtype, value);
    });
    return values;
  }
  const auto hidden = static_cast<int64_t>(sum.size());
  std::vector<std::byte> row(static_cast<size_t>(wire_row_bytes(wire, hidden)));
  values.resize(sum.size());
  for (int64_t group = 0; group < hidden / kQuantiseGroup; ++group) {
    code_group(wire, sum.data() + group * kQuantiseGroup, row.data(), hidden, group);
    read_group(wire, row.data(), hidden, group, values.data() + group * kQuantiseGroup);
  }
  return values;
}

// --- routes ---

// One kept route as both ends see it.
struct Route {
  int64_t token = 0;
  size_t target = 0;  // rank
  int64_t slot = 0;
  int64_t source_col = 0;  // of weights at the source: k, or the expert for a map
  int64_t row_col = 0;     // of weights at the receiver: k for kRankMajor, else 0
  int64_t expert = 0;      // among the receiver's own
  float weight = 1;        // held by the plan
  int num_experts = 0;     // that tokens choose among
};

// Returns the routes of a rank's tokens: by token, then target, then slot.
std::vector<Route> routes_of(const PlanData& source) {
  std::vector<Route> routes;
  for (size_t target = 0; target < source.sent.size(); ++target) {
    const Arrivals& arrivals = source.sent[target];
    const int32_t first_expert = static_cast<int32_t>(target) * source.shape.num_local_experts();
    size_t j = 0;
    for (size_t i = 0; i < arrivals.token.size(); ++i) {
      for (; j < static_cast<size_t>(arrivals.route_begin[i + 1]); ++j) {
        routes.push_back(
            {.token = arrivals.token[i],
             .target = target,
             .slot = arrivals.slot[j],
             .source_col = source.shape.from_map
                               ? expert_of(source.shape, first_expert + arrivals.expert[j])
                               : arrivals.k[j],
             .row_col = arrivals.one_row ? arrivals.k[j] : 0,
             .expert = arrivals.expert[j],
             .weight = arrivals.weight.empty() ? 1.0F : arrivals.weight[j],
             .num_experts = source.shape.num_chosen_experts()}
        );
      }
    }
  }
  std::ranges::stable_sort(routes, [](const Route& a, const Route& b) {
    return std::tie(a.token, a.target, a.slot) < std::tie(b.token, b.target, b.slot);
  });
  return routes;
}

// Stores the `scales` of a row by the wanted layout.
void store_scales(
    const PlanData& plan, const DispatchOutput& out, int64_t row, const std::byte* scales
) {
  const int64_t row_bytes = out.scales.row_bytes();
  if (out.scale_layout == ScaleLayout::kByRow) {
    std::memcpy(row_of(out.scales, row), scales, static_cast<size_t>(row_bytes));
    return;
  }
  constexpr int64_t kWord = 4;
  const int64_t stride = plan.shape.options.expert_stride;
  const int64_t words = row_bytes / kWord;
  const int64_t in_block = row % stride;
  for (int64_t word = 0; word < words; ++word) {
    int64_t place = row / stride * stride * words + word * stride + in_block;
    if (out.scale_layout == ScaleLayout::kInTiles) {
      constexpr int64_t kRows = 128;  // of a tile, in four columns
      const int64_t tile = row / stride * ((stride + kRows - 1) / kRows) + in_block / kRows;
      const int64_t in_tile = in_block % 32 * 4 + in_block % kRows / 32;
      place = (tile * words + word) * kRows + in_tile;
    }
    std::memcpy(out.scales.data + place * kWord, scales + word * kWord, size_t{kWord});
  }
}

void zero_padding(const PlanData& plan, const DispatchOutput& out) {
  const std::vector<std::byte> zeros(static_cast<size_t>(out.scales.row_bytes()));
  for (const auto& [begin, end] : plan.padding) {
    for (int64_t row = begin; row < end; ++row) {
      for (const Tensor& tensor : {out.rows, out.weights}) {
        if (tensor.is_given()) {
          zero_row(tensor, row);
        }
      }
      if (out.scales.is_given()) {
        store_scales(plan, out, row, zeros.data());
      }
    }
  }
}

int32_t& integer_at(const Tensor& tensor, int64_t row, int64_t col) {
  return reinterpret_cast<int32_t*>(row_of(tensor, row))[col];
}

int64_t& expert_at(const Tensor& tensor, int64_t row, int64_t k) {
  return reinterpret_cast<int64_t*>(row_of(tensor, row))[k];
}

void count_rows(const PlanData& plan, const DispatchOutput& out) {
  for (size_t expert = 0; expert < plan.rows_per_expert.size(); ++expert) {
    const auto rows = static_cast<int32_t>(plan.rows_per_expert[expert]);
    const auto col = static_cast<int64_t>(expert);
    if (out.counts.is_given()) {
      integer_at(out.counts, 0, col) = rows;
    }
    if (out.count_sums.is_given()) {
      integer_at(out.count_sums, 0, col) += rows;
    }
  }
}

// Returns the weight that a route's source gives its row; 0 where it names no expert.
float source_weight(const Route& route, const CombineInput& source) {
  int64_t named = 0;
  if (source.source_idx.is_given()) {
    const std::byte* row = row_of(source.source_idx, route.token);
    named = source.source_idx.dtype == DType::kInt64
                ? reinterpret_cast<const int64_t*>(row)[route.source_col]
                : reinterpret_cast<const int32_t*>(row)[route.source_col];
  }
  return named < 0 || named >= route.num_experts
             ? 0.0F
             : at(source.source_weights, route.token, route.source_col);
}

// Returns a route's row, times its weight if the source asks for that.
Row term_of(const Route& route, const CombineInput& receiver, const CombineInput& source) {
  Row term = load(receiver.rows, route.slot);
  if (source.scale != CombineScale::kNone) {
    const float factor =
        source.scale == CombineScale::kPlanWeights ? route.weight : source_weight(route, source);
    for (float& value : term) {
      value *= factor;
    }
  }
  return term;
}

// Returns a rank's routes by token, then choice. A map's choices are its experts.
std::vector<Route> routes_by_choice(const PlanData& source) {
  std::vector<Route> routes = routes_of(source);
  std::ranges::stable_sort(routes, [](const Route& a, const Route& b) {
    return std::tie(a.token, a.source_col) < std::tie(b.token, b.source_col);
  });
  return routes;
}

// Combines one rank's tokens by SumOrder::kTopk.
void combine_by_choice(
    const PlanData& source,
    std::span<const CombineInput> in,
    const CombineInput& own,
    const CombineOutput& out
) {
  const std::vector<Route> routes = routes_by_choice(source);
  auto route = routes.begin();
  for (int64_t token = 0; token < source.shape.num_tokens; ++token) {
    Row total;
    zero_row(out.x, token);
    if (out.weights.is_given()) {
      zero_row(out.weights, token);
    }
    for (; route != routes.end() && route->token == token; ++route) {
      add(total, term_of(*route, in[route->target], own));
      if (out.weights.is_given()) {
        at(out.weights, token, route->source_col) =
            at(in[route->target].weights, route->slot, route->row_col);
      }
    }
    store(out.x, token, total);
  }
}

}  // namespace

void reference_dispatch(
    std::span<const Plan> plans,
    std::span<const DispatchInput> in,
    std::span<const DispatchOutput> out
) {
  for (size_t to = 0; to < plans.size(); ++to) {
    zero_padding(contents_of(plans[to]), out[to]);
    count_rows(contents_of(plans[to]), out[to]);
    for (int64_t row = 0; row < out[to].experts.rows; ++row) {
      for (int64_t k = 0; k < out[to].experts.cols; ++k) {
        expert_at(out[to].experts, row, k) = -1;
      }
    }
  }
  for (size_t from = 0; from < plans.size(); ++from) {
    const std::vector<Route> routes = routes_of(contents_of(plans[from]));
    for (const Route& route : routes) {
      const DispatchOutput& to = out[route.target];
      copy_row(to.rows, route.slot, in[from].x, route.token);
      if (in[from].scales.is_given()) {
        const std::byte* scales = row_of(in[from].scales, route.token);
        store_scales(contents_of(plans[route.target]), to, route.slot, scales);
      }
      if (in[from].weights.is_given()) {
        zero_row(to.weights, route.slot);
      }
      if (to.sources.is_given()) {
        integer_at(to.sources, route.slot, 0) = static_cast<int32_t>(from);
        integer_at(to.sources, route.slot, 1) = static_cast<int32_t>(route.token);
      }
      if (to.experts.is_given()) {
        expert_at(to.experts, route.slot, route.row_col) = route.expert;
      }
    }
    for (const Route& route : in[from].weights.is_given() ? routes : std::vector<Route>()) {
      at(out[route.target].weights, route.slot, route.row_col) =
          at(in[from].weights, route.token, route.source_col);
    }
  }
}

void reference_combine(
    std::span<const Plan> plans,
    std::span<const CombineInput> in,
    std::span<const CombineOutput> out,
    std::span<const int> domain_of
) {
  const auto is_other = [&](int domain) { return domain != domain_of[0]; };
  const bool has_domains = std::ranges::any_of(domain_of, is_other);
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const bool has_one_row = plans[rank].layout() == Layout::kRankMajor;
    const DType dtype = out[rank].x.dtype;
    const Wire wire = in[rank].wire;
    const Tensor& weights = out[rank].weights;
    WEFT_CHECK_ARG(
        Context{},
        !has_one_row || in[rank].scale == CombineScale::kNone,
        "combine: rows cannot be scaled (a row of layout rank_major belongs to several routes)"
    );
    if (plans[rank].order() == SumOrder::kTopk) {
      combine_by_choice(contents_of(plans[rank]), in, in[rank], out[rank]);
      continue;
    }
    const std::vector<Route> routes = routes_of(contents_of(plans[rank]));
    auto route = routes.begin();
    for (int64_t token = 0; token < plans[rank].num_tokens(); ++token) {
      zero_row(out[rank].x, token);
      if (weights.is_given()) {
        zero_row(weights, token);
      }
      std::map<int, Row> domains;
      while (route != routes.end() && route->token == token) {
        const size_t target = route->target;
        Row partial;
        for (; route != routes.end() && route->token == token && route->target == target; ++route) {
          if (partial.empty() || !has_one_row) {
            add(partial, term_of(*route, in[target], in[rank]));
          }
          if (weights.is_given()) {
            at(weights, token, route->source_col) =
                at(in[target].weights, route->slot, route->row_col);
          }
        }
        add(domains[domain_of.empty() ? 0 : domain_of[target]], sent(partial, dtype, wire));
      }
      Row total;
      for (const auto& [domain, sum] : domains) {
        add(total, has_domains ? sent(sum, dtype, wire) : sum);
      }
      store(out[rank].x, token, total);
    }
  }
}

}  // namespace weft
