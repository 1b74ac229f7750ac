// SPDX-License-Identifier: Apache-2.0
// Calls by copy engines give the bits of the reference, fail as others do, and are what is asked
// for.
#include <gtest/gtest.h>

#include <array>

#include "gpu/fault_world.hpp"
#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// Calls in a row, so that both areas are used while other ranks may be a call behind.
std::vector<CaseData> copied_cases(const ExchangeSetup& setup, DType dtype, Layout layout) {
  constexpr std::array<const char*, 4> kCalls = {"dc", "ddd", "cdc", "dccd"};
  std::vector<CaseData> cases;
  for (uint64_t i = 0; i < kCalls.size(); ++i) {
    const uint64_t seed = 60'000 + static_cast<uint64_t>(setup.num_ranks) * 100 +
                          static_cast<uint64_t>(dtype) * 20 + static_cast<uint64_t>(layout) * 4 + i;
    Case spec = random_case(setup, seed);
    spec.dtype = dtype;
    set_layout(spec, layout);
    spec.byte_cols = setup.hidden;
    spec.calls = dtype == DType::kByte ? "dd" : kCalls[i];
    spec.is_late = i % 2 == 1;
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

class GpuCopiedTest : public GpuParamTest<int> {};

TEST_P(GpuCopiedTest, EqualsTheReference) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.copy_engines = true;
    setup.num_experts = 3 * setup.num_ranks;
    setup.max_topk = 5;
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kByte}) {
        for (const Mover mover : movers_here()) {
          setup.mover = mover;
          setup.num_sms = mover == Mover::kVector ? 3 : 0;
          setup.hidden = dtype == DType::kFloat16 ? 2072 : 64;  // long rows are added by others
          setup.max_tokens = dtype == DType::kBFloat16 ? 700 : 70;
          setup.has_own_stream = !setup.has_own_stream;
          failures.add(run_cases_on_threads(copied_cases(setup, dtype, layout)));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCopiedTest, testing::Values(2, 3, 4, 8));

class GpuCopiedCallsTest : public GpuTest {};

TEST_F(GpuCopiedCallsTest, EqualTheReferenceForLargerCalls) {
  for (const int64_t hidden : {2048, 7168}) {
    ExchangeSetup setup = gpu_setup(2, num_gpus());
    setup.copy_engines = true;
    setup.hidden = hidden;
    setup.max_tokens = 800;
    setup.num_experts = 16;
    setup.max_topk = 8;
    Case spec;
    spec.num_tokens = {799, 620};
    spec.topk = 8;
    spec.dtype = DType::kBFloat16;
    spec.pad_multiple = 128;
    spec.calls = "dc";
    EXPECT_EQ(run_on_threads(setup, spec), "");
  }
}

// Calls whose rows do not fit go as usual; the counter tells.
TEST_F(GpuCopiedCallsTest, AreMadeWhereRowsFit) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.copy_engines = true;
  setup.hidden = 512;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Case spec;
    spec.num_tokens = {20, 30};
    spec.dtype = dtype;
    spec.calls = "dcd";
    const CaseData data = make_case_data(setup, spec);
    run_threads(setup.num_ranks, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      EXPECT_EQ(run_cases(exchange, std::span(&data, 1), &group), "");
      const ExchangeStats stats = exchange.stats();
      EXPECT_EQ(stats.num_dispatches, 2);
      EXPECT_EQ(stats.num_combines, 1);
      EXPECT_EQ(stats.num_copied, dtype == DType::kBFloat16 ? 3 : 0);
      group.barrier();
    });
  }
}

CallOptions by_copies() {
  CallOptions call;
  call.copy_engines = true;
  return call;
}

TEST_F(GpuCopiedCallsTest, NameTheFieldThatDiffers) {
  expect_disagreement(num_gpus(), "dispatch: copy_engines", {"false", "true"}, [](FaultRank& own) {
    const CallOptions call = own.rank == 2 ? by_copies() : CallOptions{};
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, call);
  });
  expect_disagreement(num_gpus(), "combine: copy_engines", {"true", "false"}, [](FaultRank& own) {
    const CallOptions call = own.rank == 2 ? CallOptions{} : by_copies();
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out, call);
  });
}

TEST_F(GpuCopiedCallsTest, RefuseWrongArguments) {
  expect_refusal(
      num_gpus(),
      "dispatch",
      "dispatch: x has shape [31, 32] (expected [32, 32])",
      [](FaultRank& own) {
        own.dispatch_in.x.rows -= own.rank == 1 ? 1 : 0;
        own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, by_copies());
      }
  );
}

TEST_F(GpuCopiedCallsTest, NameTheRankThatDoesNotCome) {
  const FaultCall plan = [](FaultRank& own) { own.make_plan(); };
  expect_timeout(num_gpus(), "dispatch", 2, plan, [](FaultRank& own) {
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, by_copies());
  });
  expect_timeout(num_gpus(), "combine", 2, plan, [](FaultRank& own) {
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out, by_copies());
  });
}

}  // namespace
}  // namespace weft::test
