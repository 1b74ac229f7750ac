// SPDX-License-Identifier: Apache-2.0
// GPUs in several domains: what crosses through host memory and a transport gives the bits of the
// reference, whatever the domains' sizes. Ranks are threads that share the GPUs that are there.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "core/env.hpp"
#include "gpu/gpu_test.hpp"
#include "plan/random_routing.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

struct World {
  const char* name;
  std::vector<int> domain_of;
};

const std::vector<World>& all_worlds() {
  static const std::vector<World> worlds = {
      {"two_and_two", {0, 0, 1, 1}},
      {"two_and_one", {0, 0, 1}},
      {"one_and_three", {0, 1, 1, 1}},
      {"interleaved", {0, 1, 0, 1, 1}},
      {"three_three_two", {0, 0, 0, 1, 1, 1, 2, 2}},
      {"all_alone", {0, 1, 2}}};
  return worlds;
}

ExchangeSetup domains_setup(std::vector<int> domain_of) {
  ExchangeSetup setup = gpu_setup(static_cast<int>(domain_of.size()), num_gpus());
  setup.domain_of = std::move(domain_of);
  setup.num_experts = 2 * setup.num_ranks;
  setup.max_topk = 6;
  setup.max_tokens = 100;
  return setup;
}

class GpuDomainsTest : public GpuParamTest<size_t> {
 protected:
  void SetUp() override {
    GpuParamTest<size_t>::SetUp();
    setup_ = domains_setup(all_worlds()[GetParam()].domain_of);
  }

  void run(std::initializer_list<uint64_t> seeds, const std::function<void(Case&)>& change) {
    std::vector<CaseData> cases;
    for (const uint64_t seed : seeds) {
      Case spec = random_case(setup_, seed);
      change(spec);
      cases.push_back(make_case_data(setup_, spec));
    }
    failures_.add(run_cases_on_threads(cases));
  }

  ExchangeSetup setup_;
  FailureCount failures_;
};

// Several plans at once, of every kind that random cases know.
TEST_P(GpuDomainsTest, GiveTheBitsOfTheReference) {
  for (const Mover mover : movers_here()) {
    for (const bool has_own_stream : {false, true}) {
      setup_.mover = mover;
      setup_.has_own_stream = has_own_stream;
      run({1, 2, 3, 4, 5, 6, 7, 8}, [](Case& /*spec*/) {});
      if (failures_.are_too_many()) {
        return;
      }
    }
  }
}

TEST_P(GpuDomainsTest, AddInTheOrderOfTheReference) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    for (const CombineScale scale :
         {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
      if (failures_.are_too_many() ||
          (layout == Layout::kRankMajor && scale != CombineScale::kNone)) {
        continue;
      }
      run({11, 12, 13}, [&, i = 0](Case& spec) mutable {
        constexpr std::array kDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
        spec.dtype = kDTypes[static_cast<size_t>(i)];
        spec.output =
            std::array{OutputMemory::kDirect, OutputMemory::kStaged, OutputMemory::kMixed}[i++ % 3];
        spec.layout = layout;
        spec.pad_multiple = layout == Layout::kRankMajor ? 1 : 4;
        spec.scale = scale;
        spec.has_plan_weights = true;
        spec.topk = 6;
        spec.calls = "dcc";
        std::fill(spec.num_tokens.begin(), spec.num_tokens.end(), 70);
        spec.num_tokens.back() = 0;
      });
    }
  }
}

TEST_P(GpuDomainsTest, TakeManyTokensAndScales) {
  setup_.max_tokens = 900;
  run({21, 22}, [&](Case& spec) {
    spec.num_tokens.assign(static_cast<size_t>(setup_.num_ranks), 1);
    spec.num_tokens[0] = 900;
    spec.num_tokens.back() = 557;
    spec.dtype = DType::kByte;
    spec.byte_cols = 4096;
    spec.calls = "dd";
    spec.scale_cols = 7;
    spec.output = spec.seed == 21 ? OutputMemory::kMixed : OutputMemory::kDirect;
  });
}

TEST_P(GpuDomainsTest, TakeTokensThatGoToOneDomainAlone) {
  run({31, 32, 33}, [&](Case& spec) {
    spec.index = IndexKind::kInt32;
    const int first = static_cast<int>(spec.seed - 31) * (setup_.num_experts - 2) / 2;
    spec.experts = {first, first + 1};
    spec.topk = 2;
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GpuDomainsTest,
    testing::Range<size_t>(0, 6),
    [](const auto& parameter) { return all_worlds()[parameter.param].name; }
);

class GpuRandomDomainsTest : public GpuTest {};

// Sizes, domains, transports and everything else by chance.
TEST_F(GpuRandomDomainsTest, GiveTheBitsOfTheReference) {
  FailureCount failures;
  const uint64_t num_rounds = number_from_env("WEFT_GPU_CASES", 60) / 6;
  for (uint64_t round = 1; round <= num_rounds && !failures.are_too_many(); ++round) {
    RandomSource random(~round);
    std::vector<int> domain_of = {0};
    int num_domains = 1;
    const auto num_ranks = static_cast<size_t>(random.between(2, 6));
    while (domain_of.size() < num_ranks) {
      const auto domain = static_cast<int>(random.between(0, num_domains));
      num_domains = std::max(num_domains, domain + 1);
      domain_of.push_back(domain);
    }
    if (num_domains == 1) {
      domain_of.back() = 1;
    }
    ExchangeSetup setup = random_setup(round);
    setup.num_ranks = static_cast<int>(num_ranks);
    setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 3));
    setup.num_gpus = round % 2 == 0 ? num_gpus() : 1;
    setup.domain_of = domain_of;
    setup.timeout = kGpuTimeout;
    setup.transport = std::array<const char*, 3>{
        "loopback",
        "faulty:loopback?delay=0.05&reorder=0.5&hold_us=100&hide_mapped=1",
        "ofi:tcp"}[round % 3];
    std::vector<CaseData> cases;
    for (uint64_t i = 0; i < 6; ++i) {
      cases.push_back(make_case_data(setup, random_case(setup, round * 6 + i)));
    }
    failures.add(run_cases_on_threads(cases));
  }
}

}  // namespace
}  // namespace weft::test
