// SPDX-License-Identifier: Apache-2.0
#include "exchange/reference/reference_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

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

float load(const ConstTensor& tensor, int64_t row, int64_t col) {
  const auto* half = reinterpret_cast<const uint16_t*>(row_of(tensor, row));
  return tensor.dtype == DType::kFloat32 ? at(tensor, row, col) : to_float(tensor.dtype, half[col]);
}

void store(const Tensor& tensor, int64_t row, int64_t col, float value) {
  if (tensor.dtype == DType::kFloat32) {
    at(tensor, row, col) = value;
  } else {
    reinterpret_cast<uint16_t*>(row_of(tensor, row))[col] = to_half(tensor.dtype, value);
  }
}

float round_to(DType dtype, float value) {
  return dtype == DType::kFloat32 ? value : to_float(dtype, to_half(dtype, value));
}

// One route as both ends see it.
struct Route {
  int64_t token = 0;
  int64_t slot = 0;
  int64_t source_col = 0;  // of weights at the source: k, or the expert for a map
  int64_t row_col = 0;     // of weights at the receiver: k for kRankMajor, else 0
  float weight = 1;        // held by the plan
};

// The kept routes from a rank to another, in token order, a token's routes in ascending slot order.
std::vector<Route> routes_between(const PlanData& source, int to_rank) {
  const Arrivals& arrivals = source.sent[static_cast<size_t>(to_rank)];
  std::vector<Route> routes;
  for (size_t i = 0; i < arrivals.token.size(); ++i) {
    const auto begin = static_cast<size_t>(arrivals.route_begin[i]);
    const auto end = static_cast<size_t>(arrivals.route_begin[i + 1]);
    for (size_t j = begin; j < end; ++j) {
      const int64_t expert = arrivals.expert[j] + to_rank * source.shape.num_local_experts();
      routes.push_back({
          .token = arrivals.token[i],
          .slot = arrivals.slot[j],
          .source_col = source.shape.from_map ? expert : arrivals.k[j],
          .row_col = arrivals.one_row ? arrivals.k[j] : 0,
          .weight = arrivals.weight.empty() ? 1.0F : arrivals.weight[j],
      });
    }
  }
  std::stable_sort(routes.begin(), routes.end(), [](const Route& a, const Route& b) {
    return a.token != b.token ? a.token < b.token : a.slot < b.slot;
  });
  return routes;
}

void zero_padding(const PlanData& plan, const DispatchOutput& out) {
  for (const auto& [begin, end] : plan.padding) {
    for (int64_t row = begin; row < end; ++row) {
      zero_row(out.rows, row);
      if (out.weights.is_given()) {
        zero_row(out.weights, row);
      }
      if (out.scales.is_given()) {
        zero_row(out.scales, row);
      }
    }
  }
}

// A token's rows on one rank, read column by column.
struct PartialSum {
  const CombineInput& receiver;
  const CombineInput& source;
  std::span<const Route> routes;  // of one token, ascending slot
  bool one_row;

  [[nodiscard]] float term(const Route& route, int64_t col) const {
    const float value = load(receiver.rows, route.slot, col);
    switch (source.scale) {
      case CombineScale::kNone:
        return value;
      case CombineScale::kPlanWeights:
        return value * route.weight;
      case CombineScale::kSourceWeights:
        return value * at(source.source_weights, route.token, route.source_col);
    }
    return value;
  }

  [[nodiscard]] float at_col(int64_t col) const {
    float sum = term(routes[0], col);
    const size_t num_rows = one_row ? 1 : routes.size();
    for (size_t i = 1; i < num_rows; ++i) {
      sum += term(routes[i], col);
    }
    return round_to(receiver.rows.dtype, sum);
  }
};

// What the ranks of one domain have of a token, by rank.
using DomainSum = std::vector<PartialSum>;

float sum_at_col(const DomainSum& partials, int64_t col) {
  float sum = partials[0].at_col(col);
  for (size_t i = 1; i < partials.size(); ++i) {
    sum += partials[i].at_col(col);
  }
  return round_to(partials[0].receiver.rows.dtype, sum);
}

// `domains`: by domain; those that have nothing of the token are left out.
void write_sum(const CombineOutput& out, int64_t token, const std::map<int, DomainSum>& domains) {
  for (int64_t col = 0; col < out.x.cols; ++col) {
    float sum = 0;
    bool is_first = true;
    for (const auto& [domain, partials] : domains) {
      const float part = sum_at_col(partials, col);
      sum = is_first ? part : sum + part;
      is_first = false;
    }
    store(out.x, token, col, sum);
  }
}

std::span<const Route> routes_of(std::span<const Route> routes, int64_t token) {
  const auto before = [](const Route& route, int64_t value) { return route.token < value; };
  const auto begin = std::lower_bound(routes.begin(), routes.end(), token, before);
  const auto end = std::lower_bound(begin, routes.end(), token + 1, before);
  return {begin, end};
}

void combine_rank(
    const PlanData& plan,
    std::span<const CombineInput> in,
    const CombineInput& mine,
    const CombineOutput& out,
    std::span<const int> domain_of
) {
  const bool one_row = plan.shape.options.layout == Layout::kRankMajor;
  std::vector<std::vector<Route>> routes;
  for (int peer = 0; peer < plan.shape.num_ranks; ++peer) {
    routes.push_back(routes_between(plan, peer));
  }
  for (int64_t token = 0; token < plan.shape.num_tokens; ++token) {
    zero_row(out.x, token);
    if (out.weights.is_given()) {
      zero_row(out.weights, token);
    }
    std::map<int, DomainSum> domains;
    for (size_t peer = 0; peer < routes.size(); ++peer) {
      const auto there = routes_of(routes[peer], token);
      if (there.empty()) {
        continue;
      }
      const int domain = domain_of.empty() ? 0 : domain_of[peer];
      domains[domain].push_back({in[peer], mine, there, one_row});
      if (!out.weights.is_given()) {
        continue;
      }
      for (const Route& route : there) {
        at(out.weights, token, route.source_col) = at(in[peer].weights, route.slot, route.row_col);
      }
    }
    if (!domains.empty()) {
      write_sum(out, token, domains);
    }
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
    for (size_t from = 0; from < plans.size(); ++from) {
      const auto routes = routes_between(contents_of(plans[from]), static_cast<int>(to));
      for (const Route& route : routes) {
        copy_row(out[to].rows, route.slot, in[from].x, route.token);
        if (in[from].scales.is_given()) {
          copy_row(out[to].scales, route.slot, in[from].scales, route.token);
        }
        if (in[from].weights.is_given()) {
          zero_row(out[to].weights, route.slot);
        }
      }
      for (const Route& route : routes) {
        if (!in[from].weights.is_given()) {
          break;
        }
        at(out[to].weights, route.slot, route.row_col) =
            at(in[from].weights, route.token, route.source_col);
      }
    }
  }
}

void reference_combine(
    std::span<const Plan> plans,
    std::span<const CombineInput> in,
    std::span<const CombineOutput> out,
    std::span<const int> domain_of
) {
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    WEFT_CHECK_ARG(
        Context{},
        plans[rank].layout() != Layout::kRankMajor || in[rank].scale == CombineScale::kNone,
        "combine: rows cannot be scaled (a row of layout rank_major belongs to several routes)"
    );
    combine_rank(contents_of(plans[rank]), in, in[rank], out[rank], domain_of);
  }
}

}  // namespace weft
