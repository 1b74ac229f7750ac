// SPDX-License-Identifier: Apache-2.0
// The exchange on GPUs gives the bits of the reference: every number of ranks, on one GPU as
// threads and on all that are there. Each on the exchange's own stream and on one of the caller's.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "gpu/gpu_test.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// Several cases alive at once on one exchange.
std::vector<CaseData> matrix_cases(const ExchangeSetup& setup, DType dtype, Layout layout) {
  const uint64_t seed = static_cast<uint64_t>(setup.num_ranks) * 1000 +
                        static_cast<uint64_t>(dtype) * 100 + static_cast<uint64_t>(layout) * 10;
  std::vector<CaseData> cases;
  for (uint64_t i = 0; i < 4; ++i) {
    Case spec = random_case(setup, seed + i);
    spec.dtype = dtype;
    set_layout(spec, layout);
    if (dtype == DType::kByte) {
      spec.calls = "dd";
    }
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

// Plan and dispatch in one call, again and again on one exchange, so that both parities of eager
// rows are used while the other ranks may be a call behind.
std::vector<CaseData> routed_cases(const ExchangeSetup& setup, Layout layout, uint64_t num_cases) {
  std::vector<CaseData> cases;
  for (uint64_t seed = 0; cases.size() < num_cases; ++seed) {
    Case spec = random_case(setup, 40'000 + seed);
    make_routed(spec, layout, seed, seed % 4 == 3, setup.hidden);
    spec.index = seed % 2 == 0 ? IndexKind::kInt64 : IndexKind::kInt32;
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

// Plan and dispatch in one call, split-phase, with combines by source weights, which return a row
// for each route; some are received by the next call.
std::vector<CaseData> later_cases(const ExchangeSetup& setup, Layout layout, uint64_t num_cases) {
  std::vector<CaseData> cases;
  for (uint64_t seed = 0; cases.size() < num_cases; ++seed) {
    Case spec = random_case(setup, 50'000 + seed);
    spec.layout = layout;
    spec.index = seed % 2 == 0 ? IndexKind::kInt64 : IndexKind::kInt32;
    spec.room = seed % 3 == 0 ? Room::kOneRowShort : Room::kSpare;
    spec.dtype = seed % 3 == 1 ? DType::kFloat16 : DType::kBFloat16;
    spec.calls = seed % 4 == 3 ? "dd" : "dcc";
    spec.is_routed = true;
    spec.receives_later = true;
    spec.has_weights = false;
    spec.scale = CombineScale::kSourceWeights;
    spec.skips_source_weights = seed % 4 < 2;
    spec.has_marks = layout == Layout::kExpertStrided && seed % 2 == 0;
    spec.is_late = seed % 5 == 0;
    cases.push_back(make_case_data(setup, spec));
  }
  return cases;
}

class GpuMatrixTest : public GpuParamTest<int> {
 protected:
  // Every layout and dtype by every mover and number of SMs.
  void run_matrix(int num_gpus) {
    ExchangeSetup setup = gpu_setup(GetParam(), num_gpus);
    setup.num_experts = 3 * setup.num_ranks;
    setup.max_tokens = 70;
    setup.max_topk = 5;
    FailureCount failures;
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kByte}) {
        for (const Mover mover : movers_here()) {
          for (const int num_sms : {2, 8, 0}) {
            setup.mover = mover;
            setup.num_sms = num_sms;
            setup.hidden = num_sms == 8 ? 2072 : 56;  // rows beyond 4 KB are combined by others
            setup.has_own_stream = !setup.has_own_stream;
            failures.add(run_cases_on_threads(matrix_cases(setup, dtype, layout)));
            if (failures.are_too_many()) {
              return;
            }
          }
        }
      }
    }
  }
};

TEST_P(GpuMatrixTest, OnOneGpu) {
  run_matrix(1);
}

TEST_P(GpuMatrixTest, OnAllGpus) {
  if (num_gpus() < 2 || GetParam() < 2) {
    GTEST_SKIP() << "one GPU serves all ranks";
  }
  run_matrix(num_gpus());
}

TEST_P(GpuMatrixTest, SendsFirstAndReceivesLater) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.num_experts = 3 * setup.num_ranks;
    setup.max_topk = 5;
    for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const Mover mover : movers_here()) {
        setup.mover = mover;
        setup.num_sms = mover == Mover::kBulk ? 0 : 2;
        setup.max_tokens = mover == Mover::kBulk ? 300 : 70;
        setup.hidden = mover == Mover::kBulk ? 2080 : 64;
        setup.has_own_stream = !setup.has_own_stream;
        failures.add(run_cases_on_threads(later_cases(setup, layout, 8)));
        if (failures.are_too_many()) {
          return;
        }
      }
    }
  }
}

// Rows travel while the plan is made.
TEST_P(GpuMatrixTest, PlanAndDispatchInOneCall) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.num_experts = 3 * setup.num_ranks;
    setup.max_topk = 5;
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const Mover mover : movers_here()) {
        for (const int num_sms : {2, 0}) {
          setup.mover = mover;
          setup.num_sms = num_sms;
          setup.max_tokens = num_sms == 2 ? 70 : 300;  // several blocks plan
          setup.hidden = num_sms == 2 ? 64 : 2080;
          setup.has_own_stream = !setup.has_own_stream;
          failures.add(run_cases_on_threads(routed_cases(setup, layout, 8)));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuMatrixTest, testing::Values(1, 2, 3, 4, 8));

class GpuRandomTest : public GpuTest {};

// Setups and cases of any kind; WEFT_GPU_CASES says how many cases.
TEST_F(GpuRandomTest, EqualsTheReference) {
  constexpr uint64_t kCasesPerExchange = 8;
  const uint64_t num_cases = number_from_env("WEFT_GPU_CASES", 200);
  FailureCount failures;
  for (uint64_t round = 0; round * kCasesPerExchange < num_cases; ++round) {
    ExchangeSetup setup = random_setup(7000 + round);
    setup.num_gpus = round % 2 == 0 ? num_gpus() : 1;
    setup.mover = mover_in_turn(round / 2);
    setup.num_sms = std::array{0, 2, 3, 17}[round % 4];
    setup.has_own_stream = round % 3 == 0;
    setup.timeout = kGpuTimeout;
    std::vector<CaseData> cases;
    for (uint64_t i = 0; i < kCasesPerExchange; ++i) {
      cases.push_back(make_case_data(setup, random_case(setup, round * kCasesPerExchange + i)));
    }
    failures.add(run_cases_on_threads(cases));
    if (failures.are_too_many()) {
      return;
    }
  }
}

// All are alive before the first is used: memory for plans grows on the way.
TEST_F(GpuRandomTest, KeepsMorePlansThanThereIsMemoryForAtFirst) {
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(2, gpus);
    setup.max_tokens = 16;
    std::vector<CaseData> cases;
    for (uint64_t seed = 9000; seed < 9160; ++seed) {
      cases.push_back(make_case_data(setup, random_case(setup, seed)));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "") << gpus << " GPUs";
  }
}

// More tokens than chunks of one token, and rows of many pieces.
TEST_F(GpuRandomTest, EqualsTheReferenceForLargerCalls) {
  FailureCount failures;
  for (const int num_ranks : {1, 2, 4}) {
    for (const Mover mover : movers_here()) {
      for (const int64_t hidden : {264, 7168}) {
        ExchangeSetup setup = gpu_setup(num_ranks, num_gpus());
        setup.mover = mover;
        setup.hidden = hidden;
        setup.max_tokens = hidden > 1000 ? 600 : 1500;
        setup.num_experts = 8 * num_ranks;
        setup.max_topk = 8;
        Case spec;
        spec.num_tokens.assign(static_cast<size_t>(num_ranks), setup.max_tokens - 87);
        spec.num_tokens[0] = setup.max_tokens - 1;
        spec.topk = hidden > 1000 ? 4 : 8;
        spec.dtype = DType::kBFloat16;
        spec.calls = "dc";
        for (const OutputMemory output : {OutputMemory::kDirect, OutputMemory::kStaged}) {
          spec.output = output;
          spec.layout = output == OutputMemory::kDirect ? Layout::kExpertMajor : Layout::kRankMajor;
          spec.pad_multiple = output == OutputMemory::kDirect ? 128 : 1;
          failures.add(run_on_threads(setup, spec));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::test
