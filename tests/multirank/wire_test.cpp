// SPDX-License-Identifier: Apache-2.0
// Sums that travel coded (CombineInput::wire): the bits of the reference, whatever carries them,
// the bounds of their errors, and the bytes that they take.
#include "call/wire.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <span>

#include "core/half.hpp"
#include "multirank/transport_cases.hpp"
#include "support/errors.hpp"
#include "support/wire_bound.hpp"

namespace weft::test {
namespace {

Case wire_case(const ExchangeSetup& setup, uint64_t seed, Wire wire) {
  Case spec = random_case(setup, seed);
  spec.dtype = DType::kBFloat16;
  spec.calls = "cdc";
  spec.wire = wire;
  return spec;
}

class WireTest : public TransportCasesTest {
 protected:
  WireTest() {
    setup_.max_tokens = 60;
    setup_.hidden = 256;
  }
};

TEST_P(WireTest, GivesTheBitsOfTheReference) {
  for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
    std::vector<CaseData> cases;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      cases.push_back(make_case_data(setup_, wire_case(setup_, seed, wire)));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

// Each way in which a row is multiplied, with tokens enough for several chunks.
TEST_P(WireTest, MultipliesAsTheReferenceDoes) {
  setup_.num_threads = 3;
  for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
    std::vector<CaseData> cases;
    for (const CombineScale scale :
         {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
      Case spec = wire_case(setup_, 20 + static_cast<uint64_t>(scale), wire);
      spec.layout = Layout::kExpertMajor;
      spec.scale = scale;
      spec.has_plan_weights = true;
      spec.topk = 6;
      spec.repeat_experts = true;
      std::fill(spec.num_tokens.begin(), spec.num_tokens.end(), 50);
      spec.num_tokens.back() = 0;
      cases.push_back(make_case_data(setup_, spec));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    WireTest,
    testing::Combine(
        testing::Values(
            "loopback",
            "shm",
            "faulty:loopback?seed=3&delay=0.2&reorder=0.5&hide_mapped=1&hold_us=200"
        ),
        testing::Values(
            std::vector{0},
            std::vector{0, 0},
            std::vector{0, 0, 0, 0},
            std::vector{0, 0, 1, 1},
            std::vector{0, 1, 0, 1, 1}
        ),
        testing::Values(FanOut::kSource, FanOut::kReceiver)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    Fabric,
    WireTest,
    testing::Combine(
        testing::Values("ofi:tcp", "ofi:shm"),
        testing::Values(std::vector{0, 0, 0}, std::vector{0, 0, 1, 1}),
        testing::Values(FanOut::kReceiver)
    ),
    test_name
);

// Inputs and outputs of one combine of 4 ranks of two experts, three for each token.
class WireCombine {
 public:
  static constexpr int kRanks = 4;
  static constexpr int64_t kTokens = 40;
  static constexpr int64_t kHidden = 256;

  WireCombine(std::vector<int> domain_of, Wire wire) : wire_(wire) {
    setup_.num_ranks = kRanks;
    setup_.domain_of = std::move(domain_of);
    setup_.num_experts = 2 * kRanks;
    setup_.hidden = kHidden;
    setup_.max_tokens = kTokens;
    Case spec;
    spec.num_tokens.assign(kRanks, kTokens);
    spec.topk = 3;
    spec.dtype = DType::kBFloat16;
    spec.calls = "c";
    data_ = make_case_data(setup_, spec);
    RandomSource random(11);
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      rows_.push_back(random_values(DType::kBFloat16, data_.plans[r].num_rows(), kHidden, random));
      out_.emplace_back(DType::kBFloat16, kTokens, kHidden);
      crossing_bytes_.push_back(0);
      returned_bytes_.push_back(0);
    }
    run_threads(kRanks, [&](const Group& group) {
      const auto rank = static_cast<size_t>(group.rank());
      Exchange exchange = make_exchange(group, setup_);
      const RankRouting& routing = data_.routing[rank];
      const Plan plan = exchange.plan(routing.routing(), routing.options);
      exchange.combine(plan, {.rows = rows_[rank].view(), .wire = wire_}, {.x = out_[rank].view()});
      crossing_bytes_[rank] = exchange.stats().crossing_bytes;
      returned_bytes_[rank] = plan.returned_bytes(wire_row_bytes(wire_, kHidden));
      group.barrier();
    });
  }

  [[nodiscard]] int64_t crossing_bytes(size_t rank) const { return crossing_bytes_[rank]; }
  [[nodiscard]] int64_t returned_bytes(size_t rank) const { return returned_bytes_[rank]; }
  [[nodiscard]] const Matrix& out(size_t rank) const { return out_[rank]; }
  // The routes of a token are route_slots() of its rank's plan; of the expert's rank the rows.
  [[nodiscard]] double row_value(int rank, int64_t row, int64_t col) const {
    return bf16_to_float(rows_[static_cast<size_t>(rank)].as<uint16_t>()[row * kHidden + col]);
  }
  [[nodiscard]] const CaseData& data() const { return data_; }

 private:
  Wire wire_;
  ExchangeSetup setup_;
  CaseData data_;
  std::vector<Matrix> rows_;
  std::vector<Matrix> out_;
  std::vector<int64_t> crossing_bytes_;
  std::vector<int64_t> returned_bytes_;
};

TEST(WireBytesTest, AreAboutHalfOfThoseOfBf16) {
  const WireCombine plain({0, 0, 1, 1}, Wire::kNone);
  const WireCombine fp8({0, 0, 1, 1}, Wire::kFp8);
  const WireCombine log({0, 0, 1, 1}, Wire::kLogFmt10);
  for (size_t rank = 0; rank < WireCombine::kRanks; ++rank) {
    const auto bf16_bytes = static_cast<double>(plain.crossing_bytes(rank));
    EXPECT_GT(bf16_bytes, 0);
    // A head of four bytes for 128 elements, and up to 16 bytes of a row for alignment.
    EXPECT_NEAR(static_cast<double>(fp8.crossing_bytes(rank)) / bf16_bytes, 0.53, 0.02);
    EXPECT_NEAR(static_cast<double>(log.crossing_bytes(rank)) / bf16_bytes, 0.65, 0.02);
    const auto returned = static_cast<double>(plain.returned_bytes(rank));
    EXPECT_GT(returned, 0);
    EXPECT_NEAR(static_cast<double>(fp8.returned_bytes(rank)) / returned, 0.53, 0.02);
    EXPECT_NEAR(static_cast<double>(log.returned_bytes(rank)) / returned, 0.65, 0.02);
  }
}

// A token with one row, whose bits the sum keeps, coded by the expert's rank and again at the end.
TEST(WireOutputTest, MayBeCodedOnceMore) {
  constexpr int64_t kHidden = 512;  // coded rows have no gap at their end
  for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
    ExchangeSetup setup;
    setup.num_experts = 4;
    setup.hidden = kHidden;
    Case spec;
    spec.num_tokens = {20, 9};
    spec.topk = 1;
    spec.hole_fraction = 0.3;
    spec.dtype = DType::kBFloat16;
    const CaseData data = make_case_data(setup, spec);
    RandomSource random(17);
    std::vector<Matrix> rows;
    for (const Plan& plan : data.plans) {
      rows.push_back(random_values(DType::kBFloat16, plan.num_rows(), kHidden, random));
    }
    const int64_t row_bytes = wire_row_bytes(wire, kHidden);
    std::vector<Matrix> outs;
    for (const int64_t num_tokens : spec.num_tokens) {
      outs.emplace_back(DType::kByte, num_tokens, row_bytes);
    }
    run_threads(2, [&](const Group& group) {
      const auto rank = static_cast<size_t>(group.rank());
      Exchange exchange = make_exchange(group, setup);
      const RankRouting& routing = data.routing[rank];
      const Plan plan = exchange.plan(routing.routing(), routing.options);
      const CombineInput in = {.rows = rows[rank].view(), .wire = wire};
      exchange.combine(plan, in, {.x = outs[rank].view()});
      group.barrier();
    });
    for (size_t rank = 0; rank < 2; ++rank) {
      const std::span<const int32_t> slots = data.plans[rank].route_slots();
      for (size_t token = 0; token < slots.size(); ++token) {
        std::vector<std::byte> expected(static_cast<size_t>(row_bytes));
        for (int64_t group = 0; group < kHidden / kQuantiseGroup; ++group) {
          std::array<float, kQuantiseGroup> values = {};
          if (slots[token] >= 0) {
            const auto expert = data.routing[rank].topk_idx.as<int64_t>()[token];
            const auto* row = rows[static_cast<size_t>(expert) / 2].as<uint16_t>() +
                              slots[token] * kHidden + group * kQuantiseGroup;
            std::transform(row, row + values.size(), values.begin(), bf16_to_float);
            code_group(wire, values.data(), expected.data(), kHidden, group);
            read_group(wire, expected.data(), kHidden, group, values.data());
          }
          code_group(wire, values.data(), expected.data(), kHidden, group);
        }
        const std::byte* actual = outs[rank].view().data + static_cast<int64_t>(token) * row_bytes;
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), actual)) << token;
      }
    }
  }
}

TEST(WireCallTest, IsTheSameOnAllRanks) {
  ExchangeSetup setup;
  setup.num_ranks = 3;
  setup.num_experts = 3;
  setup.hidden = 128;
  Case spec;
  spec.num_tokens = {5, 5, 5};
  spec.dtype = DType::kBFloat16;
  const CaseData data = make_case_data(setup, spec);
  std::vector<std::string> texts(3);
  run_threads(3, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange = make_exchange(group, setup);
    const RankRouting& routing = data.routing[rank];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    const Matrix rows(DType::kBFloat16, plan.num_rows(), setup.hidden);
    Matrix x(DType::kBFloat16, plan.num_tokens(), setup.hidden);
    texts[rank] = text_of(thrown_by([&] {
      const Wire wire = rank == 1 ? Wire::kLogFmt10 : Wire::kFp8;
      exchange.combine(plan, {.rows = rows.view(), .wire = wire}, {.x = x.view()});
    }));
    EXPECT_TRUE(is_canary(x.view()));
  });
  const std::string rest = " (must be equal on all ranks) ";
  EXPECT_EQ(
      texts[0], "combine: wire = fp8 here and logfmt10 on rank 1" + rest + "[rank 0/3, loopback]"
  );
  EXPECT_EQ(
      texts[1], "combine: wire = logfmt10 here and fp8 on rank 0" + rest + "[rank 1/3, loopback]"
  );
}

// Exact values that one rank, or one domain, has for a token, and how far what it sends may be from
// them.
struct Part {
  std::vector<double> values = std::vector<double>(WireCombine::kHidden);
  std::vector<double> errors = std::vector<double>(WireCombine::kHidden);

  void add(const Part& other) {
    for (size_t col = 0; col < values.size(); ++col) {
      values[col] += other.values[col];
      errors[col] += other.errors[col];
    }
  }
  // fp32 has added up to four terms before.
  void code(Wire wire) {
    constexpr size_t kGroup = kQuantiseGroup;
    for (size_t first = 0; first < values.size(); first += kGroup) {
      GroupRange range = range_of(std::span(values).subspan(first, kGroup));
      const double most = *std::max_element(
          errors.begin() + static_cast<ptrdiff_t>(first),
          errors.begin() + static_cast<ptrdiff_t>(first + kGroup)
      );
      range.largest += most;
      range.least = most > 0 ? range.largest * 0x1p-32 : range.least;
      for (size_t col = first; col < first + kGroup; ++col) {
        const double farthest = std::fabs(values[col]) + errors[col];
        errors[col] += wire_bound(wire, farthest, range) + range.largest * 0x1p-20;
      }
    }
  }
};

// Returns the sum for a token, added by rank and domain, and its bound.
Part exact_token(
    const WireCombine& run, size_t rank, int64_t token, Wire wire, std::span<const int> domain_of
) {
  const CaseData& data = run.data();
  const Plan& plan = data.plans[rank];
  const auto topk = static_cast<size_t>(plan.topk());
  std::map<int, std::map<int, Part>> domains;
  for (size_t k = 0; k < topk; ++k) {
    const size_t route = static_cast<size_t>(token) * topk + k;
    const int32_t slot = plan.route_slots()[route];
    if (slot < 0) {
      continue;
    }
    const auto expert = static_cast<int>(data.routing[rank].topk_idx.as<int64_t>()[route]);
    const int target = expert / plan.num_local_experts();
    Part& part = domains[domain_of[static_cast<size_t>(target)]][target];
    for (size_t col = 0; col < part.values.size(); ++col) {
      part.values[col] += run.row_value(target, slot, static_cast<int64_t>(col));
    }
  }
  Part total;
  for (auto& [domain, ranks] : domains) {
    Part sum;
    for (auto& [target, part] : ranks) {
      part.code(wire);
      sum.add(part);
    }
    if (domain_of.back() != domain_of.front()) {
      sum.code(wire);
    }
    total.add(sum);
  }
  return total;
}

TEST(WireErrorTest, IsWithinItsBound) {
  for (const std::vector<int>& domain_of : {std::vector{0, 0, 0, 0}, std::vector{0, 0, 1, 1}}) {
    for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
      const WireCombine run(domain_of, wire);
      double largest = 0;
      for (size_t rank = 0; rank < WireCombine::kRanks; ++rank) {
        for (int64_t token = 0; token < WireCombine::kTokens; ++token) {
          const Part exact = exact_token(run, rank, token, wire, domain_of);
          for (size_t col = 0; col < exact.values.size(); ++col) {
            const auto at = static_cast<size_t>(token * WireCombine::kHidden) + col;
            const double got = bf16_to_float(run.out(rank).as<uint16_t>()[at]);
            const double error = std::fabs(got - exact.values[col]);
            const double rounded = std::fabs(got) * 0x1p-8;  // to bf16
            ASSERT_LE(error, exact.errors[col] + rounded);
            largest = std::max(largest, error / (exact.errors[col] + rounded));
          }
        }
      }
      EXPECT_GT(largest, 0.1);  // the bound is one of this error and of none much greater
    }
  }
}

}  // namespace
}  // namespace weft::test
