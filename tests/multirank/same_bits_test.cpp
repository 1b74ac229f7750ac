// SPDX-License-Identifier: Apache-2.0
// Worker threads, wires and their timing, and other ranks' tokens must not change a bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>

#include "core/half.hpp"
#include "multirank/worlds.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using Parameters = std::tuple<std::string, int, FanOut>;

class SameBitsTest : public testing::TestWithParam<Parameters> {};

TEST_P(SameBitsTest, ForAnyNumberOfWorkersAnyWireAndAnyFanOut) {
  ExchangeSetup setup;
  setup.num_ranks = 3;
  setup.transport = std::get<0>(GetParam());
  if (const std::string reason = obstacle(setup.transport); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  setup.num_threads = std::get<1>(GetParam());
  setup.fan_out = std::get<2>(GetParam());
  setup.num_experts = 9;
  setup.max_tokens = 150;
  std::vector<CaseData> cases;
  for (uint64_t seed = 40; seed < 44; ++seed) {
    Case spec = random_case(setup, seed);
    spec.num_tokens = {150, 99, 1};
    spec.room = Room::kExact;
    cases.push_back(make_case_data(setup, spec));
  }
  EXPECT_EQ(run_cases_on_threads(cases), "");
}

std::string test_name(const testing::TestParamInfo<Parameters>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)) +
                     (std::get<2>(info.param) == FanOut::kSource ? "_source" : "_receiver");
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_'
  );
  return name;
}

// Libfabric's transport is skipped where it is missing.
INSTANTIATE_TEST_SUITE_P(
    Fabric,
    SameBitsTest,
    testing::Combine(
        testing::Values(
            "ofi:tcp",
            "ofi:shm",
            "faulty:ofi:tcp?seed=6&delay=0.2&reorder=0.5",
            "faulty:ofi:shm?seed=7&delay=0.2&reorder=0.5"
        ),
        testing::Values(1, 3),
        testing::Values(FanOut::kReceiver)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    All,
    SameBitsTest,
    testing::Combine(
        testing::Values(
            "loopback",
            "shm",
            "faulty:loopback?seed=3&delay=0.2&reorder=0.5",
            "faulty:loopback?seed=4&reorder=1&hide_mapped=1",
            "faulty:shm?seed=5&delay=0.2&reorder=0.5&hide_mapped=1"
        ),
        testing::Values(1, 2, 3),
        testing::Values(FanOut::kSource, FanOut::kReceiver)
    ),
    test_name
);

// Outputs too big for any cache are stored past them.
TEST(BigOutputTest, HasTheBitsOfTheReferenceForBothFanOuts) {
  constexpr int64_t kRows = 12'700;  // of 4096 B: over 48 MiB, most of it padding
  for (const FanOut fan_out : {FanOut::kSource, FanOut::kReceiver}) {
    ExchangeSetup setup;
    setup.fan_out = fan_out;
    setup.num_experts = 2;
    setup.hidden = 1024;
    Case spec;
    spec.num_tokens = {60, 33};
    spec.pad_multiple = kRows;
    EXPECT_EQ(run_on_threads(setup, spec), "");
  }
}

// The model of a rank's experts: expert e doubles, halves or turns a row's values.
void apply_experts(const Plan& plan, std::vector<uint16_t>& rows, int64_t hidden) {
  for (int expert = 0; expert < plan.num_local_experts(); ++expert) {
    const auto e = static_cast<size_t>(expert);
    const float factor =
        1.0F + 0.3F * static_cast<float>(plan.rank() * plan.num_local_experts() + expert);
    const auto begin = static_cast<size_t>(plan.expert_begin()[e] * hidden);
    const auto end = begin + static_cast<size_t>(plan.rows_per_expert()[e] * hidden);
    for (size_t i = begin; i < end; ++i) {
      rows[i] = float_to_bf16(bf16_to_float(rows[i]) * factor);
    }
  }
}

// Rank 1's tokens after their way through the experts of all ranks.
std::vector<uint16_t> tokens_of_rank_1(const ExchangeSetup& setup, const Case& spec) {
  const CaseData data = make_case_data(setup, spec);
  std::vector<uint16_t> result;
  run_threads(setup.num_ranks, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange(group, setup.config());
    const Plan plan = exchange.plan(data.routing[rank].routing(), data.routing[rank].options);
    RandomSource random(rank);  // the same tokens whatever the others bring
    const Matrix x = random_values(DType::kBFloat16, plan.num_tokens(), setup.hidden, random);
    std::vector<uint16_t> rows(static_cast<size_t>(plan.num_rows() * setup.hidden));
    const Tensor rows_view = {
        reinterpret_cast<std::byte*>(rows.data()), DType::kBFloat16, plan.num_rows(), setup.hidden};
    exchange.dispatch(plan, {.x = x.view()}, {.rows = rows_view});
    apply_experts(plan, rows, setup.hidden);
    Matrix out(DType::kBFloat16, plan.num_tokens(), setup.hidden);
    exchange.combine(plan, {.rows = rows_view}, {.x = out.view()});
    if (rank == 1) {
      result.assign(out.as<uint16_t>(), out.as<uint16_t>() + out.num_elements());
    }
  });
  return result;
}

TEST(BatchInvarianceTest, KeepsARanksResultWhenOtherRanksTokensChange) {
  ExchangeSetup setup;
  setup.num_ranks = 3;
  setup.num_experts = 6;
  setup.max_tokens = 200;
  Case spec;
  spec.topk = 4;
  spec.dtype = DType::kBFloat16;
  spec.calls = "";
  spec.num_tokens = {0, 70, 0};
  const std::vector<uint16_t> alone = tokens_of_rank_1(setup, spec);
  EXPECT_EQ(alone.size(), static_cast<size_t>(70 * setup.hidden));
  for (const std::vector<int64_t>& others :
       {std::vector<int64_t>{200, 70, 1}, {33, 70, 200}, {0, 70, 64}}) {
    spec.num_tokens = others;
    EXPECT_EQ(tokens_of_rank_1(setup, spec), alone);
  }
}

}  // namespace
}  // namespace weft::test
