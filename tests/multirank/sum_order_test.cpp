// SPDX-License-Identifier: Apache-2.0
// Sums in the order of a token's choices (SumOrder::kTopk): the bits of the reference, and the same
// bits for the same tokens and experts however many ranks and domains there are.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/half.hpp"
#include "multirank/transport_cases.hpp"

namespace weft::test {
namespace {

// A random case whose sums are by choice.
Case topk_case(const ExchangeSetup& setup, uint64_t seed) {
  Case spec = random_case(setup, seed);
  spec.order = SumOrder::kTopk;
  if (spec.layout == Layout::kRankMajor) {
    spec.layout = Layout::kExpertMajor;
  }
  if (spec.dtype == DType::kByte) {
    spec.dtype = DType::kBFloat16;
  }
  spec.calls += "cc";
  return spec;
}

class SumOrderTest : public TransportCasesTest {
 protected:
  SumOrderTest() { setup_.max_tokens = 90; }
};

TEST_P(SumOrderTest, GivesTheBitsOfTheReference) {
  for (const int num_threads : {1, 3}) {
    setup_.num_threads = num_threads;
    std::vector<CaseData> cases;
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      cases.push_back(make_case_data(setup_, topk_case(setup_, seed)));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

// Each way in which a row is multiplied and stored, with tokens enough for several chunks.
TEST_P(SumOrderTest, MultipliesAsTheReferenceDoes) {
  for (const CombineScale scale :
       {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
    std::vector<CaseData> cases;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      Case spec = topk_case(setup_, 20 + static_cast<uint64_t>(dtype));
      constexpr std::array kOutputs = {
          OutputMemory::kDirect, OutputMemory::kStaged, OutputMemory::kMixed};
      spec.output = kOutputs[static_cast<size_t>(dtype) % kOutputs.size()];
      spec.dtype = dtype;
      spec.scale = scale;
      spec.has_plan_weights = true;
      spec.skips_source_weights =
          scale == CombineScale::kSourceWeights && spec.index != IndexKind::kMap;
      spec.topk = 6;
      spec.repeat_experts = true;
      std::fill(spec.num_tokens.begin(), spec.num_tokens.end(), 80);
      spec.num_tokens.back() = 0;
      cases.push_back(make_case_data(setup_, spec));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

// Every choice of a token is on one rank, which may be its own, one near or one far.
TEST_P(SumOrderTest, AddsUpWhereAllChoicesAre) {
  std::vector<CaseData> cases;
  for (int rank = 0; rank < setup_.num_ranks; ++rank) {
    Case spec = topk_case(setup_, 30 + static_cast<uint64_t>(rank));
    spec.index = IndexKind::kInt32;
    spec.experts = {3 * rank + 2, 3 * rank, 3 * rank + 1};
    spec.topk = 3;
    cases.push_back(make_case_data(setup_, spec));
  }
  EXPECT_EQ(run_cases_on_threads(cases), "");
}

const std::vector<std::vector<int>>& worlds_of_ranks() {
  static const std::vector<std::vector<int>> worlds = {
      {0}, {0, 0}, {0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1, 1}, {0, 1, 2}};
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    SumOrderTest,
    testing::Combine(
        testing::Values(
            "loopback",
            "shm",
            "faulty:loopback?seed=3&delay=0.2&reorder=0.5&hide_mapped=1&hold_us=200"
        ),
        testing::ValuesIn(worlds_of_ranks()),
        testing::Values(FanOut::kSource, FanOut::kReceiver)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    Fabric,
    SumOrderTest,
    testing::Combine(
        testing::Values("ofi:tcp", "ofi:shm"),
        testing::Values(std::vector{0, 0, 0}, std::vector{0, 0, 1, 1}),
        testing::Values(FanOut::kReceiver)
    ),
    test_name
);

// Results that must not depend on where experts live, of all tokens, one behind the other.
struct Bits {
  std::vector<uint16_t> x;         // what experts make of the tokens, by weight
  std::vector<uint16_t> gradient;  // of the tokens
  std::vector<float> weights;      // gradients of the weights
  friend bool operator==(const Bits&, const Bits&) = default;
};

// A layer of 16 experts for 150 tokens, whoever holds which of them. Expert e multiplies by a
// factor of its own, and the gradient of a weight is an element of the row.
class Layer {
 public:
  static constexpr int64_t kTokens = 150;
  static constexpr int kExperts = 16;
  static constexpr int64_t kHidden = 40;
  static constexpr int kTopk = 6;

  Layer() {
    RandomSource random(7);
    table_ = random_routing(
        {.num_tokens = kTokens,
         .num_experts = kExperts,
         .topk = kTopk,
         .hole_fraction = 0.1,
         .with_weights = true,
         .seed = 7}
    );
    x_ = random_values(DType::kBFloat16, kTokens, kHidden, random);
    gradient_ = random_values(DType::kBFloat16, kTokens, kHidden, random);
  }

  [[nodiscard]] Bits run(SumOrder order, const ExchangeSetup& setup) const {
    Bits bits = {
        std::vector<uint16_t>(kTokens * kHidden),
        std::vector<uint16_t>(kTokens * kHidden),
        std::vector<float>(kTokens * kTopk)};
    run_threads(setup.num_ranks, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      run_rank(exchange, order, bits);
      group.barrier();
    });
    return bits;
  }

 private:
  // Ranks have different numbers of tokens, the first of 16 none.
  static int64_t first_token(int rank, int num_ranks) {
    return kTokens * rank * rank / num_ranks / num_ranks;
  }

  void run_rank(Exchange& exchange, SumOrder order, Bits& bits) const {
    const int64_t first = first_token(exchange.rank(), exchange.num_ranks());
    const int64_t count = first_token(exchange.rank() + 1, exchange.num_ranks()) - first;
    const auto rows_at = [&](auto* data) {
      return Tensor{
          reinterpret_cast<std::byte*>(data + first * kHidden), DType::kBFloat16, count, kHidden};
    };
    const ConstTensor weights = matrix(table_.weight.data() + first * kTopk, count, kTopk);
    const Plan plan = exchange.plan(
        {.topk_idx = matrix(table_.expert.data() + first * kTopk, count, kTopk),
         .weights = weights},
        {.order = order}
    );
    Matrix row_weights(DType::kFloat32, plan.num_rows(), 1);
    const Buffer buffer = exchange.allocate(plan.num_rows(), kHidden, DType::kBFloat16);
    const Tensor rows = buffer.tensor();

    exchange.dispatch(
        plan, {.x = rows_at(const_cast<uint16_t*>(x_.as<uint16_t>()))}, {.rows = rows}
    );
    apply_experts(plan, rows);
    exchange.combine(
        plan, {.rows = rows, .scale = CombineScale::kPlanWeights}, {.x = rows_at(bits.x.data())}
    );

    exchange.dispatch(
        plan,
        {.x = rows_at(const_cast<uint16_t*>(gradient_.as<uint16_t>())), .weights = weights},
        {.rows = rows, .weights = row_weights.view()}
    );
    apply_experts(plan, rows);
    for (int64_t row = 0; row < plan.num_rows(); ++row) {
      const auto* elements = reinterpret_cast<const uint16_t*>(rows.data) + row * kHidden;
      row_weights.as<float>()[row] *= bf16_to_float(*elements);
    }
    exchange.combine(
        plan,
        {.rows = rows, .weights = row_weights.view()},
        {.x = rows_at(bits.gradient.data()),
         .weights = matrix(bits.weights.data() + first * kTopk, count, kTopk)}
    );
  }

  static void apply_experts(const Plan& plan, const Tensor& rows) {
    auto* const elements = reinterpret_cast<uint16_t*>(rows.data);
    for (int expert = 0; expert < plan.num_local_experts(); ++expert) {
      const auto e = static_cast<size_t>(expert);
      const int number = plan.rank() * plan.num_local_experts() + expert;
      const float factor = 1.0F + 0.3F * static_cast<float>(number);
      const int64_t begin = plan.expert_begin()[e] * kHidden;
      const int64_t end = begin + plan.rows_per_expert()[e] * kHidden;
      for (int64_t i = begin; i < end; ++i) {
        elements[i] = float_to_bf16(bf16_to_float(elements[i]) * factor);
      }
    }
  }

  RouteTable table_;
  Matrix x_;
  Matrix gradient_;
};

ExchangeSetup setup_of(int num_ranks) {
  ExchangeSetup setup;
  setup.num_ranks = num_ranks;
  setup.hidden = Layer::kHidden;
  setup.max_tokens = Layer::kTokens;
  setup.num_experts = Layer::kExperts;
  setup.max_topk = Layer::kTopk;
  return setup;
}

TEST(SumsByChoiceTest, AreTheSameForAnyNumberOfRanks) {
  const Layer layer;
  const Bits alone = layer.run(SumOrder::kTopk, setup_of(1));
  for (const int num_ranks : {2, 4, 8, 16}) {
    for (const FanOut fan_out : {FanOut::kSource, FanOut::kReceiver}) {
      ExchangeSetup setup = setup_of(num_ranks);
      setup.fan_out = fan_out;
      EXPECT_TRUE(layer.run(SumOrder::kTopk, setup) == alone) << num_ranks << " ranks";
    }
  }
  // The layer's sums are such that their order shows.
  EXPECT_FALSE(layer.run(SumOrder::kRank, setup_of(8)).x == alone.x);
  EXPECT_FALSE(layer.run(SumOrder::kRank, setup_of(8)).gradient == alone.gradient);
}

TEST(SumsByChoiceTest, AreTheSameForAnyDomains) {
  const Layer layer;
  const Bits alone = layer.run(SumOrder::kTopk, setup_of(1));
  const std::vector<std::vector<int>> worlds = {
      {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 0, 1, 1, 2, 2, 2}};
  for (const std::vector<int>& domain_of : worlds) {
    ExchangeSetup setup = setup_of(static_cast<int>(domain_of.size()));
    setup.domain_of = domain_of;
    EXPECT_TRUE(layer.run(SumOrder::kTopk, setup) == alone)
        << fmt::format("{}", fmt::join(domain_of, " "));
  }
}

// A token has two rows on each of four ranks in two domains: by choice four rows come back from the
// other domain instead of one.
TEST(SumsByChoiceTest, AreCountedByRoute) {
  ExchangeSetup setup;
  setup.num_ranks = 4;
  setup.domain_of = {0, 0, 1, 1};
  setup.num_experts = 8;
  setup.max_topk = 8;
  Case spec;
  spec.num_tokens = {10, 10, 10, 10};
  spec.topk = 8;
  spec.experts = {0, 1, 2, 3, 4, 5, 6, 7};
  spec.order = SumOrder::kTopk;
  const CaseData data = make_case_data(setup, spec);
  const int64_t row_bytes = setup.hidden * 4;
  run_threads(4, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange = make_exchange(group, setup);
    EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
    // Dispatch sends 10 tokens across. Combine returns two rows for each of 20 from there.
    EXPECT_EQ(exchange.stats().crossing_bytes, 10 * row_bytes + 40 * row_bytes);
    EXPECT_EQ(exchange.stats().crossing_bytes_by_arrival, 2 * 10 * row_bytes + 20 * row_bytes);
    const RankRouting& routing = data.routing[rank];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    EXPECT_EQ(plan.order(), SumOrder::kTopk);
    EXPECT_EQ(plan.wire_bytes(row_bytes), 30 * row_bytes);
    EXPECT_EQ(plan.returned_bytes(row_bytes), 60 * row_bytes);
  });
}

}  // namespace
}  // namespace weft::test
