// SPDX-License-Identifier: Apache-2.0
// The oracle itself, on cases small enough to know the answer by heart.
#include "exchange/reference/reference_exchange.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/half.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft {
namespace {

constexpr int kHidden = 4;
constexpr float kUntouched = 77;

using Floats = std::vector<float>;

// Two ranks of two experts. Rank 0: token 0 -> experts 0, 2; token 1 -> 1, 0. Rank 1: token 0 ->
// 0, 3.
std::vector<Plan> make_plans(const PlanOptions& options) {
  RouteTable first;
  first.num_tokens = 2;
  first.topk = 2;
  first.expert = {0, 2, 1, 0};
  RouteTable second;
  second.num_tokens = 1;
  second.topk = 2;
  second.expert = {0, 3};
  std::vector<Plan> plans;
  for (PlanData& data : reference_plans(std::vector{first, second}, 4, options)) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  return plans;
}

PlanOptions expert_major(int64_t pad_multiple) {
  PlanOptions options;
  options.pad_multiple = pad_multiple;
  return options;
}

// Rows whose elements all have the row's value.
Floats rows_of(const Floats& values) {
  Floats rows;
  for (const float value : values) {
    rows.insert(rows.end(), kHidden, value);
  }
  return rows;
}

Tensor view(Floats& data, int64_t cols) {
  return matrix(data.data(), static_cast<int64_t>(data.size()) / cols, cols);
}

ConstTensor const_view(const Floats& data, int64_t cols) {
  return matrix(data.data(), static_cast<int64_t>(data.size()) / cols, cols);
}

struct Dispatched {
  std::vector<Floats> rows;     // by rank
  std::vector<Floats> weights;  // by rank
};

// Tokens carry 10 and 11 on rank 0, 20 on rank 1; weights are 1, 2, 3, 4 and 5, 6.
Dispatched dispatch(const std::vector<Plan>& plans) {
  const std::vector<Floats> x = {rows_of({10, 11}), rows_of({20})};
  const std::vector<Floats> weights = {{1, 2, 3, 4}, {5, 6}};
  Dispatched out;
  std::vector<DispatchInput> inputs;
  std::vector<DispatchOutput> outputs;
  for (const Plan& plan : plans) {
    const auto num_rows = static_cast<size_t>(plan.num_rows());
    out.rows.emplace_back(num_rows * kHidden, kUntouched);
    out.weights.emplace_back(num_rows * static_cast<size_t>(plan.row_weight_cols()), kUntouched);
  }
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    inputs.push_back(
        {.x = const_view(x[rank], kHidden), .weights = const_view(weights[rank], 2), .scales = {}}
    );
    outputs.push_back(
        {.rows = view(out.rows[rank], kHidden),
         .weights = view(out.weights[rank], plans[rank].row_weight_cols()),
         .scales = {}}
    );
  }
  reference_dispatch(plans, inputs, outputs);
  return out;
}

TEST(ReferenceExchangeTest, CopiesEachRouteToItsSlotAndZerosPadding) {
  const Dispatched out = dispatch(make_plans(expert_major(2)));
  EXPECT_EQ(out.rows[0], rows_of({10, 11, 20, 0, 11, 0}));
  EXPECT_EQ(out.weights[0], (Floats{1, 4, 5, 0, 3, 0}));
  EXPECT_EQ(out.rows[1], rows_of({10, 0, 20, 0}));
  EXPECT_EQ(out.weights[1], (Floats{2, 0, 6, 0}));
}

TEST(ReferenceExchangeTest, LeavesSlackUntouched) {
  PlanOptions options = expert_major(1);
  options.row_budget = 5;
  const Dispatched out = dispatch(make_plans(options));
  EXPECT_EQ(out.rows[0], rows_of({10, 11, 20, 11, kUntouched}));
  EXPECT_EQ(out.rows[1], rows_of({10, 20, kUntouched, kUntouched, kUntouched}));
}

TEST(ReferenceExchangeTest, PutsWeightsOfRankMajorRowsAtTheirK) {
  PlanOptions options;
  options.layout = Layout::kRankMajor;
  const Dispatched out = dispatch(make_plans(options));
  EXPECT_EQ(out.rows[0], rows_of({10, 11, 20}));
  EXPECT_EQ(out.weights[0], (Floats{1, 0, 3, 4, 5, 0}));
  EXPECT_EQ(out.rows[1], rows_of({10, 20}));
  EXPECT_EQ(out.weights[1], (Floats{0, 2, 0, 6}));
}

TEST(ReferenceExchangeTest, TellsExpertsOfRankMajorRows) {
  const auto plans = make_plans({.layout = Layout::kRankMajor, .row_budget = 4});
  std::vector<Floats> rows(2, Floats(4 * kHidden));
  std::vector<std::vector<int64_t>> experts(2, std::vector<int64_t>(8, -7));
  const std::vector<Floats> x = {rows_of({10, 11}), rows_of({20})};
  std::vector<DispatchInput> in;
  std::vector<DispatchOutput> out;
  for (size_t rank = 0; rank < 2; ++rank) {
    in.push_back({.x = const_view(x[rank], kHidden)});
    out.push_back({.rows = view(rows[rank], kHidden), .experts = matrix(experts[rank].data(), 4, 2)}
    );
  }
  reference_dispatch(plans, in, out);
  EXPECT_EQ(experts[0], (std::vector<int64_t>{0, -1, 1, 0, 0, -1, -1, -1}));
  EXPECT_EQ(experts[1], (std::vector<int64_t>{-1, 0, -1, 1, -1, -1, -1, -1}));
}

// An output of one rank with all that it may have beside its rows.
struct Beside {
  explicit Beside(const Plan& plan)
      : rows(static_cast<size_t>(plan.num_rows()) * kHidden),
        scales(static_cast<size_t>(plan.num_rows()) * 2, kUntouched),
        sources(static_cast<size_t>(plan.num_rows()) * 2, -7) {}
  [[nodiscard]] DispatchOutput output(ScaleLayout layout) {
    return {
        .rows = view(rows, kHidden),
        .scales = view(scales, 2),
        .sources = matrix(sources.data(), static_cast<int64_t>(sources.size()) / 2, 2),
        .counts = matrix(counts.data(), 1, 2),
        .count_sums = matrix(count_sums.data(), 1, 2),
        .scale_layout = layout};
  }

  Floats rows;
  Floats scales;
  std::vector<int32_t> sources;
  std::vector<int32_t> counts = {-7, -7};
  std::vector<int32_t> count_sums = {100, 200};
};

std::vector<Beside> dispatch_beside(const std::vector<Plan>& plans, ScaleLayout layout) {
  const std::vector<Floats> x = {rows_of({10, 11}), rows_of({20})};
  const std::vector<Floats> scales = {{1, 2, 3, 4}, {5, 6}};
  std::vector<Beside> out(plans.begin(), plans.end());
  std::vector<DispatchInput> inputs;
  std::vector<DispatchOutput> outputs;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    inputs.push_back({.x = const_view(x[rank], kHidden), .scales = const_view(scales[rank], 2)});
    outputs.push_back(out[rank].output(layout));
  }
  reference_dispatch(plans, inputs, outputs);
  return out;
}

TEST(ReferenceExchangeTest, TellsSourcesAndCounts) {
  const auto out = dispatch_beside(make_plans(expert_major(2)), ScaleLayout::kByRow);
  EXPECT_EQ(out[0].sources, (std::vector{0, 0, 0, 1, 1, 0, -7, -7, 0, 1, -7, -7}));
  EXPECT_EQ(out[0].counts, (std::vector{3, 1}));
  EXPECT_EQ(out[0].count_sums, (std::vector{103, 201}));
  EXPECT_EQ(out[0].scales, (Floats{1, 2, 3, 4, 5, 6, 0, 0, 3, 4, 0, 0}));
  EXPECT_EQ(out[1].sources, (std::vector{0, 0, -7, -7, 1, 0, -7, -7}));
  EXPECT_EQ(out[1].counts, (std::vector{1, 1}));
  EXPECT_EQ(out[1].count_sums, (std::vector{101, 201}));
}

TEST(ReferenceExchangeTest, LaysScalesByColumnAndLeavesSlack) {
  PlanOptions options = {.layout = Layout::kExpertStrided, .pad_multiple = 2, .expert_stride = 5};
  const auto out = dispatch_beside(make_plans(options), ScaleLayout::kByColumn);
  const float slack = kUntouched;
  EXPECT_EQ(
      out[0].scales,
      (Floats{1, 3, 5,     0,     slack, 2, 4, 6,     0,     slack,  // expert 0
              3, 0, slack, slack, slack, 4, 0, slack, slack, slack}  // expert 1
      )
  );
}

struct Combined {
  std::vector<Floats> x;
  std::vector<Floats> weights;
};

Combined combine(
    const std::vector<Plan>& plans,
    const std::vector<Floats>& rows,
    CombineScale scale = CombineScale::kNone
) {
  const std::vector<Floats> row_weights = {{1, 2, 3, 4}, {5, 6}};
  const std::vector<Floats> source_weights = {{2, 3, 5, 7}, {11, 13}};
  Combined out = {
      {Floats(2 * kHidden, kUntouched), Floats(kHidden, kUntouched)},
      {Floats(4, kUntouched), Floats(2, kUntouched)}};
  std::vector<CombineInput> inputs;
  std::vector<CombineOutput> outputs;
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    CombineInput input;
    input.rows = const_view(rows[rank], kHidden);
    input.weights = const_view(row_weights[rank], plans[rank].row_weight_cols());
    input.scale = scale;
    if (scale == CombineScale::kSourceWeights) {
      input.source_weights = const_view(source_weights[rank], 2);
    }
    inputs.push_back(input);
    outputs.push_back({.x = view(out.x[rank], kHidden), .weights = view(out.weights[rank], 2)});
  }
  reference_combine(plans, inputs, outputs);
  return out;
}

TEST(ReferenceExchangeTest, SumsATokensRowsAndReturnsWeightsToTheirPlace) {
  const auto plans = make_plans(expert_major(1));
  const Combined out = combine(plans, {rows_of({1, 2, 4, 8}), rows_of({16, 32})});
  EXPECT_EQ(out.x[0], rows_of({1 + 16, 2 + 8}));
  EXPECT_EQ(out.x[1], rows_of({4 + 32}));
  EXPECT_EQ(out.weights[0], (Floats{1, 5, 4, 2}));
  EXPECT_EQ(out.weights[1], (Floats{3, 6}));
}

TEST(ReferenceExchangeTest, MultipliesEachRowByItsRoutesWeight) {
  const auto plans = make_plans(expert_major(1));
  const std::vector<Floats> rows = {rows_of({1, 2, 4, 8}), rows_of({16, 32})};
  const Combined out = combine(plans, rows, CombineScale::kSourceWeights);
  EXPECT_EQ(out.x[0], rows_of({1 * 2 + 16 * 3, 8 * 5 + 2 * 7}));
  EXPECT_EQ(out.x[1], rows_of({4 * 11 + 32 * 13}));
}

TEST(ReferenceExchangeTest, KeepsTheSignOfZero) {
  const auto plans = make_plans(expert_major(1));
  const Combined out = combine(plans, {rows_of({-0.0F, 0, -0.0F, 0}), rows_of({-0.0F, -0.0F})});
  EXPECT_TRUE(std::signbit(out.x[0][0]));
  EXPECT_FALSE(std::signbit(out.x[0][kHidden]));
}

TEST(ReferenceExchangeTest, RefusesToScaleRankMajorRows) {
  PlanOptions options;
  options.layout = Layout::kRankMajor;
  const auto plans = make_plans(options);
  CombineInput input;
  input.scale = CombineScale::kPlanWeights;
  const std::vector<CombineInput> inputs(2, input);
  const std::vector<CombineOutput> outputs(2);
  EXPECT_THROW(reference_combine(plans, inputs, outputs), Error);
}

// The sum of a token whose choices are these experts of two ranks with two each, and whose rows
// hold these values, by rank and slot.
float sum_of_one_token(
    SumOrder order,
    const std::vector<int32_t>& experts,
    DType dtype,
    const std::vector<Floats>& values
) {
  RouteTable one;
  one.num_tokens = 1;
  one.topk = static_cast<int>(experts.size());
  one.expert = experts;
  RouteTable none;
  none.topk = one.topk;
  std::vector<Plan> plans;
  for (PlanData& data : reference_plans(std::vector{one, none}, 4, {.order = order})) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  std::vector<std::vector<uint16_t>> halves;
  std::vector<CombineInput> inputs;
  for (const Floats& rows : values) {
    std::vector<uint16_t>& stored = halves.emplace_back();
    for (const float value : rows) {
      stored.push_back(float_to_bf16(value));
    }
    ConstTensor tensor = const_view(rows, 1);
    if (dtype == DType::kBFloat16) {
      tensor.data = reinterpret_cast<const std::byte*>(stored.data());
      tensor.dtype = dtype;
    }
    inputs.push_back({.rows = tensor});
  }
  float x = 0;
  auto* const data = reinterpret_cast<std::byte*>(&x);
  const std::vector<CombineOutput> outputs = {
      {.x = {data, dtype, 1, 1}}, {.x = {nullptr, dtype, 0, 1}}};
  reference_combine(plans, inputs, outputs);
  uint16_t half = 0;
  std::memcpy(&half, &x, sizeof half);
  return dtype == DType::kFloat32 ? x : bf16_to_float(half);
}

// Two rows on rank 0 and one on rank 1. In one go the sum is 1 + 2^-7, which bf16 can hold; rounded
// on each hop, both halves of 2^-7 are ties that go to the even 1.
TEST(ReferenceExchangeTest, RoundsOncePerHopOrOnce) {
  const std::vector<Floats> values = {{1, 0x1p-8F}, {0x1p-8F}};
  const auto sum = [&](SumOrder order) {
    return sum_of_one_token(order, {0, 1, 2}, DType::kBFloat16, values);
  };
  EXPECT_EQ(sum(SumOrder::kRank), 1.0F);
  EXPECT_EQ(sum(SumOrder::kTopk), 1 + 0x1p-7F);
}

// Expert 2 is the first choice, 0 the second and 1 the last.
TEST(ReferenceExchangeTest, AddsByRankOrByChoice) {
  const std::vector<Floats> values = {{-0x1p30F, 1}, {0x1p30F}};
  const auto sum = [&](SumOrder order) {
    return sum_of_one_token(order, {2, 0, 1}, DType::kFloat32, values);
  };
  EXPECT_EQ(sum(SumOrder::kRank), 0.0F);
  EXPECT_EQ(sum(SumOrder::kTopk), 1.0F);
}

}  // namespace
}  // namespace weft
