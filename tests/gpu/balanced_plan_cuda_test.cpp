// SPDX-License-Identifier: Apache-2.0
// Plans with replicas (PlanOptions::balance) on GPUs of one host, alone and in one launch with
// their dispatch: the bits of the reference, and what all ranks hear where a call cannot be.
// graph_cuda_test.cpp has replays.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "gpu/fault_world.hpp"
#include "gpu/graph_rank.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

class GpuBalanceTest : public GpuParamTest<int> {
 protected:
  // Several alive at once on one exchange, with plans without replicas between.
  static std::vector<CaseData> cases_of(const ExchangeSetup& setup, uint64_t first_seed) {
    std::vector<CaseData> cases;
    for (uint64_t seed = first_seed; seed < first_seed + 8; ++seed) {
      Case spec = seed % 8 == 5 ? random_case(setup, seed) : balanced_case(setup, seed);
      const bool is_by_choice = spec.layout != Layout::kRankMajor && seed % 3 == 0;
      spec.order = is_by_choice ? SumOrder::kTopk : SumOrder::kRank;
      spec.is_late = seed % 7 == 0;
      cases.push_back(make_case_data(setup, spec));
    }
    return cases;
  }

  // Plan and dispatch in one call, again and again, with and without replicas, so that both
  // parities of eager rows are used while the other ranks may be a call behind.
  static std::vector<CaseData> routed_cases_of(
      const ExchangeSetup& setup, Layout layout, uint64_t num_cases
  ) {
    std::vector<CaseData> cases;
    for (uint64_t seed = 60'000; cases.size() < num_cases; ++seed) {
      Case spec = seed % 8 == 5 ? random_case(setup, seed) : balanced_case(setup, seed);
      make_routed(spec, layout, seed, seed % 5 == 3, setup.hidden);
      const bool is_by_choice = layout != Layout::kRankMajor && seed % 3 == 1;
      spec.order = is_by_choice ? SumOrder::kTopk : SumOrder::kRank;
      spec.index = seed % 4 < 2 ? IndexKind::kInt64 : IndexKind::kInt32;
      spec.receives_later = spec.calls == "d" && seed % 4 == 2;  // with replicas all at once
      cases.push_back(make_case_data(setup, spec));
    }
    return cases;
  }
};

TEST_P(GpuBalanceTest, GivesTheBitsOfTheReferenceInOneLaunch) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.max_topk = 5;
    for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
      for (const Mover mover : movers_here()) {
        for (const int64_t max_tokens : {3, 70, 300}) {
          setup.mover = mover;
          setup.max_tokens = max_tokens;
          setup.num_experts = (max_tokens == 70 ? 32 : 5) * setup.num_ranks;
          setup.hidden = max_tokens == 300 ? 2080 : 64;
          setup.num_sms = max_tokens == 70 ? 2 : 0;
          setup.has_own_stream = !setup.has_own_stream;
          failures.add(run_cases_on_threads(routed_cases_of(setup, layout, 16)));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
}

TEST_P(GpuBalanceTest, GivesTheBitsOfTheReference) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.max_topk = 5;
    for (const Mover mover : movers_here()) {
      for (const int64_t max_tokens : {90, 700}) {
        setup.mover = mover;
        setup.max_tokens = max_tokens;
        setup.hidden = max_tokens == 90 ? 64 : 512;
        setup.has_own_stream = !setup.has_own_stream;
        for (uint64_t seed = 1; seed <= 32; seed += 8) {
          failures.add(run_cases_on_threads(cases_of(setup, 1000 * setup.num_ranks + seed)));
          if (failures.are_too_many()) {
            return;
          }
        }
      }
    }
  }
}

TEST_P(GpuBalanceTest, GivesTheBitsOfTheReferenceByCopyEngines) {
  FailureCount failures;
  for (const int gpus : gpu_counts()) {
    ExchangeSetup setup = gpu_setup(GetParam(), gpus);
    setup.max_topk = 5;
    setup.max_tokens = 300;
    setup.has_copy_room = true;
    setup.copy_engines = true;
    for (uint64_t seed = 1; seed <= 16; seed += 8) {
      failures.add(run_cases_on_threads(cases_of(setup, 7000 + seed)));
      if (failures.are_too_many()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuBalanceTest, testing::Values(1, 2, 3, 4, 8));

// All tokens choose the same experts, which lie on one rank: the others take their share.
class GpuBalancedPlanTest : public GpuTest {
 protected:
  static void expect_more_even(std::optional<int64_t> row_budget) {
    ExchangeSetup setup = gpu_setup(4, num_gpus());
    setup.num_experts = 8;
    Case spec;
    spec.num_tokens = {30, 10, 0, 24};
    spec.experts = {0, 1};
    spec.balance = {.replicas = 1};
    const CaseData data = make_case_data(setup, spec);
    run_threads(4, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      FaultRank own(exchange, data);
      own.options.row_budget = row_budget;
      own.make_plan();
      const Plan& plan = *own.plan;
      EXPECT_EQ(plan.num_rows(), row_budget.value_or(32));
      EXPECT_EQ(plan.required_rows(), 32);
      EXPECT_FALSE(plan.overflow());
      EXPECT_EQ(plan.num_local_experts(), 3);
      EXPECT_EQ(plan.load().unbalanced, 128);
      EXPECT_EQ(plan.load().busiest, 32);
      EXPECT_EQ(plan.routes_per_expert(), (std::vector<int64_t>{64, 64, 0, 0, 0, 0, 0, 0}));
      const auto wanted = data.plans[static_cast<size_t>(group.rank())].placement();
      EXPECT_TRUE(std::ranges::equal(plan.placement(), wanted));
      EXPECT_NE(plan.on_device().placement, nullptr);
      EXPECT_EQ(Plan::from_json(plan.to_json()).load().unbalanced, 128);
      EXPECT_TRUE(std::ranges::equal(plan.placement(), wanted));
      group.barrier();
    });
  }
};

TEST_F(GpuBalancedPlanTest, IsMoreEven) {
  expect_more_even({});
}

TEST_F(GpuBalancedPlanTest, IsMoreEvenWithinABudget) {
  expect_more_even(40);
}

// A plan and its dispatch in one launch beside the same in as many as a plan by itself takes.
class GpuBalancedLaunchTest : public GpuTest {
 protected:
  // Expects the same plan, load and rows of both on each rank, one launch exactly if `is_fused`.
  static void expect_the_same(const Balancing& balance, bool is_fused, int64_t num_experts) {
    ExchangeSetup setup = gpu_setup(4, num_gpus());
    setup.num_experts = static_cast<int>(num_experts);
    setup.max_tokens = 64;
    setup.max_topk = 3;
    Case spec;
    spec.seed = 7;
    spec.num_tokens = {50, 64, 0, 33};
    spec.topk = 3;
    spec.popularity = Popularity::kOneExpert;
    spec.repeat_experts = true;
    spec.hole_fraction = 0.2;
    spec.pad_multiple = 4;
    spec.dtype = DType::kBFloat16;
    spec.rows = 120;
    spec.balance = balance;
    const CaseData data = make_case_data(setup, spec);
    run_threads(4, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      const TestStream stream(exchange.config().device);
      const CallOptions call = {.stream = stream.get()};
      FaultRank apart(exchange, data);
      FaultRank at_once(exchange, data);
      apart.plan.emplace(exchange.plan(apart.routing, apart.options, call));
      exchange.dispatch(*apart.plan, apart.dispatch_in, apart.dispatch_out, call);
      at_once.plan_and_dispatch(call);
      stream.wait();
      exchange.check();
      const Graph graph(stream, [&] { at_once.plan_and_dispatch(call); });
      EXPECT_EQ(graph.num_nodes() == 1, is_fused) << graph.num_nodes() << " nodes";
      group.barrier();
      graph.launch();
      stream.wait();
      exchange.check();
      EXPECT_EQ(first_difference(*at_once.plan, *apart.plan), "");
      EXPECT_EQ(first_difference(*at_once.plan, data.plans[static_cast<size_t>(group.rank())]), "");
      EXPECT_TRUE(std::ranges::equal(at_once.plan->placement(), apart.plan->placement()));
      EXPECT_EQ(at_once.plan->load().busiest, apart.plan->load().busiest);
      EXPECT_EQ(at_once.plan->load().unbalanced, apart.plan->load().unbalanced);
      const auto rows = [](FaultRank& rank) {
        rank.memory.download();
        return std::array{rank.rows->result().view(), rank.row_weights->result().view()};
      };
      const auto wanted = rows(apart);
      const auto got = rows(at_once);
      EXPECT_EQ(first_difference("rows", got[0], wanted[0]), "");
      EXPECT_EQ(first_difference("weights", got[1], wanted[1]), "");
      group.barrier();
    });
  }
};

TEST_F(GpuBalancedLaunchTest, IsOneWithPlannedReplicas) {
  expect_the_same({.replicas = 1}, true, 16);
  expect_the_same({.replicas = 2, .min_rows = 5, .block_rows = 8}, true, 256);
  expect_the_same({.replicas = kMostReplicas}, true, 64);
}

// They are not worth their weights.
TEST_F(GpuBalancedLaunchTest, IsOneWithForgoneReplicas) {
  expect_the_same({.replicas = 2, .replica_rows = 1000}, true, 16);
}

TEST_F(GpuBalancedLaunchTest, IsOneWithAGivenPlacement) {
  expect_the_same({.replicas = 2, .placement = {4, -1, 8, 9, 0, 1, 0, 5}}, true, 16);
  expect_the_same(
      {.replicas = 2, .placement = {4, -1, 8, 9, 0, 1, 0, 5}, .block_rows = 8}, true, 16
  );
}

TEST_F(GpuBalancedLaunchTest, IsOneWithoutReplicas) {
  expect_the_same({}, true, 16);
}

// Blocks that plan have too little shared memory, or too few threads.
TEST_F(GpuBalancedLaunchTest, IsSeveralWhereExpertsAreTooMany) {
  expect_the_same({.replicas = 2}, false, 2048);
}

// Each time the exchange goes on, with and without replicas.
class GpuBalanceFaultTest : public GpuTest {
 protected:
  static void plan_with(FaultRank& own, const Balancing& balance) {
    own.options.balance = balance;
    own.make_plan();
  }
};

TEST_F(GpuBalanceFaultTest, NamesTheReplicasThatDiffer) {
  expect_disagreement(num_gpus(), "plan: replicas", {"1", "2"}, [](FaultRank& own) {
    plan_with(own, {.replicas = own.rank == 2 ? 2 : 1});
  });
  expect_disagreement(num_gpus(), "plan: replicas", {"1", "0"}, [](FaultRank& own) {
    plan_with(own, {.replicas = own.rank == 2 ? 0 : 1});
  });
  expect_disagreement(num_gpus(), "plan: replicas", {"0", "1"}, [](FaultRank& own) {
    plan_with(own, {.replicas = own.rank == 2 ? 1 : 0});
  });
}

TEST_F(GpuBalanceFaultTest, NamesTheReplicasThatDifferInOneLaunch) {
  const auto differ = [](int there, int otherwise) {
    return [=](FaultRank& own) {
      own.options.balance = {.replicas = own.rank == 2 ? there : otherwise};
      own.plan_and_dispatch();
    };
  };
  expect_disagreement(num_gpus(), "plan: replicas", {"1", "2"}, differ(2, 1));
  expect_disagreement(num_gpus(), "plan: replicas", {"1", "0"}, differ(0, 1));
  expect_disagreement(num_gpus(), "plan: replicas", {"0", "1"}, differ(1, 0));
}

TEST_F(GpuBalanceFaultTest, RefusesAnIndexOutOfRangeInOneLaunch) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) {
    own.options.balance = {.replicas = 2};
    own.plan_and_dispatch();
  });
}

TEST_F(GpuBalanceFaultTest, NamesTheRankThatDoesNotComeToOneLaunch) {
  expect_timeout(
      num_gpus(),
      "plan",
      1,
      [](FaultRank&) {},
      [](FaultRank& own) {
        own.options.balance = {.replicas = 1};
        own.plan_and_dispatch();
      }
  );
}

TEST_F(GpuBalanceFaultTest, RefusesAnIndexOutOfRange) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) { plan_with(own, {.replicas = 2}); });
}

// The budget keeps the host from waiting: the fault comes with what follows the plan.
TEST_F(GpuBalanceFaultTest, RefusesAnIndexOutOfRangeWithinABudget) {
  expect_bad_index_is_refused(num_gpus(), [](FaultRank& own) {
    own.options.row_budget = own.dispatch_out.rows.rows;
    plan_with(own, {.replicas = 2});
  });
}

TEST_F(GpuBalanceFaultTest, RefusesWhatARankCannotMean) {
  expect_refusal(num_gpus(), "plan", "plan: replicas = 17 (0 to 16)", [](FaultRank& own) {
    plan_with(own, {.replicas = own.rank == 1 ? 17 : 1});
  });
  expect_refusal(
      num_gpus(),
      "plan",
      "plan: the placement has 2 entries (expected 3 ranks x 1 replicas)",
      [](FaultRank& own) {
        plan_with(
            own,
            {.replicas = 1, .placement = own.rank == 1 ? std::vector{2, 0} : std::vector{2, 0, 1}}
        );
      }
  );
}

TEST_F(GpuBalanceFaultTest, GoesOnAfterwards) {
  expect_refusal(
      num_gpus(),
      "plan",
      "plan: min_rows = 0 of a replica (1 to 2147483647)",
      [](FaultRank& own) {
        const int64_t min_rows = own.rank == 1 ? 0 : 1;
        const Balancing refused = {.replicas = 1, .min_rows = min_rows};
        EXPECT_TRUE(thrown_by([&] { plan_with(own, refused); }).has_value());
        plan_with(own, {.replicas = 2});
        EXPECT_EQ(own.plan->num_local_experts(), 4);
        plan_with(own, refused);
      }
  );
}

TEST_F(GpuBalanceFaultTest, NamesTheRankThatDoesNotPlan) {
  const auto plan = [](FaultRank& own) { plan_with(own, {.replicas = 1}); };
  expect_timeout(num_gpus(), "plan", 2, plan, plan);
}

TEST_F(GpuBalanceFaultTest, IsRefusedOnAllRanksOfSeveralHosts) {
  ExchangeSetup setup = gpu_setup(2, num_gpus());
  setup.domain_of = {0, 1};
  Case spec;
  spec.num_tokens = {5, 5};
  spec.calls = "";
  spec.balance = {.replicas = 1};
  const std::string failures = run_on_threads(setup, spec);
  const std::string text = "plan: balance with 1 replicas among GPUs of several hosts";
  const size_t first = failures.find(text);
  EXPECT_NE(first, std::string::npos) << failures;
  EXPECT_NE(failures.find(text, first + 1), std::string::npos) << failures;
}

}  // namespace
}  // namespace weft::test
