// SPDX-License-Identifier: Apache-2.0
// Groups of several domains: tokens that cross to a forwarder and back give the bits of the
// reference, whatever the domains' sizes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cpu/exchange.hpp"
#include "group/control_plane.hpp"
#include "multirank/worlds.hpp"
#include "plan/random_routing.hpp"
#include "support/process_memory.hpp"
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
      {"four_of_two", {0, 0, 1, 1, 2, 2, 3, 3}},
      {"all_alone", {0, 1, 2}}};
  return worlds;
}

using Parameters = std::tuple<size_t, std::string, FanOut>;

class DomainsTest : public testing::TestWithParam<Parameters> {
 protected:
  void SetUp() override {
    const auto& [world, transport, fan_out] = GetParam();
    if (const std::string reason = obstacle(transport); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    setup_.domain_of = all_worlds()[world].domain_of;
    setup_.num_ranks = static_cast<int>(setup_.domain_of.size());
    setup_.num_experts = 2 * setup_.num_ranks;
    setup_.max_topk = 6;
    setup_.max_tokens = 100;
    setup_.transport = transport;
    setup_.fan_out = fan_out;
  }

  void run(std::initializer_list<uint64_t> seeds, const std::function<void(Case&)>& change) {
    std::vector<CaseData> cases;
    for (const uint64_t seed : seeds) {
      Case spec = random_case(setup_, seed);
      change(spec);
      cases.push_back(make_case_data(setup_, spec));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }

  ExchangeSetup setup_;
};

// Several plans at once, of every kind that random cases know.
TEST_P(DomainsTest, GiveTheBitsOfTheReference) {
  for (const int num_threads : {1, 3}) {
    setup_.num_threads = num_threads;
    run({1, 2, 3, 4, 5, 6, 7, 8}, [](Case& /*spec*/) {});
  }
}

// Each sum in each dtype, with rows that are read where they lie and rows that are not.
TEST_P(DomainsTest, AddInTheOrderOfTheReference) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    for (const CombineScale scale :
         {CombineScale::kNone, CombineScale::kPlanWeights, CombineScale::kSourceWeights}) {
      if (layout == Layout::kRankMajor && scale != CombineScale::kNone) {
        continue;
      }
      run({11, 12, 13}, [&, i = size_t{0}](Case& spec) mutable {
        constexpr std::array kDTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
        spec.dtype = kDTypes[i];
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

TEST_P(DomainsTest, TakeManyTokensAndScales) {
  setup_.max_tokens = 300;
  setup_.num_threads = 2;
  run({21, 22}, [&](Case& spec) {
    spec.num_tokens.assign(static_cast<size_t>(setup_.num_ranks), 1);
    spec.num_tokens[0] = 300;
    spec.num_tokens.back() = 257;
    spec.dtype = DType::kByte;
    spec.calls = "dd";
    spec.scale_cols = 7;
    spec.output = spec.seed == 21 ? OutputMemory::kMixed : OutputMemory::kDirect;
  });
}

TEST_P(DomainsTest, MakeFp8OfRows) {
  setup_.hidden = 256;
  run({25, 26}, [&](Case& spec) {
    spec.dtype = DType::kBFloat16;
    spec.quantise = spec.seed == 25 ? Quantise::kE4M3 : Quantise::kE5M2;
    spec.output = spec.seed == 25 ? OutputMemory::kStaged : OutputMemory::kDirect;
  });
}

TEST_P(DomainsTest, MakeBlockFormatsOfRows) {
  setup_.hidden = 256;
  run({27, 28}, [&](Case& spec) {
    spec.dtype = DType::kBFloat16;
    spec.quantise = spec.seed == 27 ? Quantise::kMxfp8 : Quantise::kNvfp4;
    spec.scale_rule = ScaleRule::kExact;
    spec.global_scale = 0.01F;
    spec.output = spec.seed == 27 ? OutputMemory::kStaged : OutputMemory::kDirect;
  });
}

TEST_P(DomainsTest, TakeTokensThatGoToOneDomainAlone) {
  run({31, 32, 33}, [&](Case& spec) {
    spec.index = IndexKind::kInt32;
    const int first = static_cast<int>(spec.seed - 31) * (setup_.num_experts - 2) / 2;
    spec.experts = {first, first + 1};
    spec.topk = 2;
  });
}

// Sizes, domains, threads and everything else by chance.
TEST(RandomDomainsTest, GiveTheBitsOfTheReference) {
  for (uint64_t round = 1; round <= (kIsSanitized ? 10 : 60); ++round) {
    ExchangeSetup setup = random_setup(round);
    RandomSource random(~round);
    setup.num_ranks = static_cast<int>(random.between(2, 7));
    setup.num_experts = setup.num_ranks * static_cast<int>(random.between(1, 3));
    setup.domain_of = {0};
    int num_domains = 1;
    while (static_cast<int>(setup.domain_of.size()) < setup.num_ranks) {
      const int domain = static_cast<int>(random.between(0, num_domains));
      num_domains = std::max(num_domains, domain + 1);
      setup.domain_of.push_back(domain);
    }
    if (round % 3 == 0) {
      setup.transport = "faulty:loopback?delay=0.05&reorder=0.5&hold_us=100&hide_mapped=1";
    }
    std::vector<CaseData> cases;
    for (uint64_t i = 0; i < 6; ++i) {
      cases.push_back(make_case_data(setup, random_case(setup, round * 6 + i)));
    }
    EXPECT_EQ(run_cases_on_threads(cases), "");
  }
}

// A token with arrivals on all four ranks: one of two near, and the two of the other domain in one.
TEST(CrossingCountTest, ShowsWhatATokenSavesBetweenDomains) {
  ExchangeSetup setup;
  setup.num_ranks = 4;
  setup.domain_of = {0, 0, 1, 1};
  setup.num_experts = 4;
  Case spec;
  spec.num_tokens = {10, 10, 10, 10};
  spec.topk = 4;
  spec.experts = {0, 1, 2, 3};
  spec.dtype = DType::kFloat32;
  spec.scale_cols = 12;
  const CaseData data = make_case_data(setup, spec);
  const int64_t row_bytes = setup.hidden * 4;
  run_threads(4, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange = make_exchange(group, setup);
    EXPECT_EQ(run_cases(exchange, {&data, 1}), "");
    // Dispatch sends 10 tokens across, combine returns the sums of 10 others.
    EXPECT_EQ(exchange.stats().crossing_bytes, 10 * (row_bytes + 12) + 10 * row_bytes);
    EXPECT_EQ(exchange.stats().crossing_bytes_by_arrival, 2 * exchange.stats().crossing_bytes);
    const RankRouting& routing = data.routing[rank];
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    EXPECT_EQ(plan.crossing_bytes(row_bytes), 10 * row_bytes);
    // 10 to the neighbour, 10 across, 10 of the other domain handed on.
    EXPECT_EQ(plan.wire_bytes(row_bytes), 30 * row_bytes);
    EXPECT_EQ(plan, data.plans[rank]);
  });
}

// The exchange that an executor on GPUs makes after losses: of some ranks, who speak for the
// others.
std::string run_without(const ExchangeSetup& setup, int lost, bool is_for_gpu) {
  std::vector<CaseData> cases;
  for (uint64_t seed = 71; seed < 79; ++seed) {
    Case spec = random_case(setup, seed);
    spec.num_tokens[static_cast<size_t>(lost)] = 0;
    spec.lost = {lost};
    cases.push_back(make_case_data(setup, spec));
  }
  const std::vector<AllGather> control =
      make_local_control(setup.num_ranks - 1, std::chrono::seconds(60));
  std::vector<std::string> differences(static_cast<size_t>(setup.num_ranks));
  run_threads(setup.num_ranks, [&](const Group& all) {
    const int rank = all.rank();
    if (rank == lost) {
      return;
    }
    const auto place = static_cast<size_t>(rank > lost ? rank - 1 : rank);
    const Group group = with_control(all, [&](std::span<const std::byte> block) {
      std::vector<Bytes> blocks = control[place](block);
      blocks.insert(blocks.begin() + lost, Bytes(block.begin(), block.end()));
      return blocks;
    });
    CpuPlace working = {.domains = domains_of(setup), .is_for_gpu = is_for_gpu, .lost = {lost}};
    Exchange exchange = Executor::exchange_by(
        std::make_unique<CpuExchange>(group, setup.config(rank), std::move(working))
    );
    differences[static_cast<size_t>(rank)] = run_cases(exchange, cases, &group);
  });
  return fmt::format("{}", fmt::join(differences, ""));
}

TEST_P(DomainsTest, GoWithoutARankThatTakesNoPart) {
  EXPECT_EQ(run_without(setup_, 0, /*is_for_gpu=*/false), "");
  EXPECT_EQ(run_without(setup_, setup_.num_ranks - 1, /*is_for_gpu=*/true), "");
}

std::string test_name(const testing::TestParamInfo<Parameters>& info) {
  const auto& [world, transport, fan_out] = info.param;
  std::string name = fmt::format(
      "{}_{}_{}",
      all_worlds()[world].name,
      transport,
      fan_out == FanOut::kSource ? "source" : "receiver"
  );
  std::replace_if(
      name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_'
  );
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    DomainsTest,
    testing::Combine(
        testing::Range(size_t{0}, all_worlds().size()),
        testing::Values(
            "loopback", "faulty:loopback?seed=3&delay=0.2&reorder=0.5&hide_mapped=1&hold_us=200"
        ),
        testing::Values(FanOut::kSource, FanOut::kReceiver)
    ),
    test_name
);

INSTANTIATE_TEST_SUITE_P(
    Fabric,
    DomainsTest,
    testing::Combine(
        testing::Values(size_t{0}, size_t{1}, size_t{3}),
        testing::Values("ofi:tcp", "faulty:ofi:tcp?seed=6&delay=0.2&reorder=0.5"),
        testing::Values(FanOut::kReceiver)
    ),
    test_name
);

}  // namespace
}  // namespace weft::test
