// SPDX-License-Identifier: Apache-2.0
// Replicas and PeerLoss::kShrink: those of a placement take over when ranks are lost, and those
// that a plan chooses lie on ranks that are left.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <optional>

#include "fault/survival_cases.hpp"

namespace weft::test {
namespace {

// Four ranks of two experts. When ranks 2 and 0 are lost, experts 0 and 5 have no copy left.
constexpr std::array<int32_t, 8> kPlacement = {4, 2, 4, 6, 0, 7, 1, -1};

TEST(TakeoverTest, GivesTheBitsOfTheReferenceWhenRanksAreKilledAtAnyStep) {
  const ExchangeSetup setup = setup_of(4, "shm");
  for (size_t i = 0; i < 24; ++i) {
    Case spec = cases()[i / 6];
    const bool is_fixed = i % 2 == 0;
    const auto step = static_cast<int>(i % 3);
    spec.index = is_fixed == (step == 1) ? IndexKind::kInt32 : IndexKind::kInt64;
    spec.balance.replicas = 2;
    if (is_fixed) {
      spec.balance.placement.assign(kPlacement.begin(), kPlacement.end());
    }
    const SurvivorRounds rounds(setup, spec);
    const auto statuses = run_forked(setup.num_ranks, [&](const Group& group) {
      Exchange exchange = shrinking(group, setup);
      std::string problem;
      for (uint64_t round = 0; round < kNumRounds && problem.empty(); ++round) {
        problem = rounds.run(exchange, round, [&](int call) {
          const bool is_time = (group.rank() == 2 && round == 1 && call == step) ||
                               (group.rank() == 0 && round == 2 && call == (step + 1) % 3);
          if (is_time) {
            std::raise(SIGKILL);
          }
        });
      }
      const CallReport report = exchange.report();
      const std::string lost = is_fixed ? "0,5" : "0,1,4,5";
      if (problem.empty() && (text(report.alive) != "1,3" || text(report.lost_experts) != lost)) {
        problem = fmt::format("alive {}, lost {}", text(report.alive), text(report.lost_experts));
      }
      return verdict(problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{128 + SIGKILL, 0, 128 + SIGKILL, 0})) << "step " << i;
  }
}

// Rows of an expert are multiplied by its number, wherever they are.
void run_experts(const Plan& plan, float* rows, int64_t hidden) {
  const int num_own = plan.num_local_experts() - plan.num_replicas();
  for (int local = 0; local < plan.num_local_experts(); ++local) {
    const int place = plan.rank() * plan.num_replicas() + local - num_own;
    const int expert = local < num_own ? plan.rank() * num_own + local
                                       : plan.placement()[static_cast<size_t>(place)];
    const auto at = static_cast<size_t>(local);
    float* first = rows + plan.expert_begin()[at] * hidden;
    std::for_each(first, first + plan.rows_per_expert()[at] * hidden, [&](float& element) {
      element *= static_cast<float>(expert + 1);
    });
  }
}

// Without the reference: a token gets what all its experts make that have a copy, in the order of
// its choices.
TEST(TakeoverTest, TokensGetWhatExpertsWithACopyMake) {
  const ExchangeSetup setup = setup_of(4, "shm");
  for (const Layout layout : {Layout::kExpertMajor, Layout::kExpertStrided}) {
    const auto statuses = run_forked(setup.num_ranks, [&](const Group& group) {
      Exchange exchange = shrinking(group, setup);
      group.barrier();
      if (group.rank() == 2) {
        std::raise(SIGKILL);
      }
      RandomSource random(static_cast<uint64_t>(group.rank()));
      const RouteTable table =
          random_routing({.num_tokens = 60, .num_experts = 8, .topk = 4}, group.rank());
      Matrix idx(DType::kInt32, table.num_tokens, table.topk);
      std::ranges::copy(table.expert, idx.as<int32_t>());
      Matrix x = random_values(DType::kFloat32, table.num_tokens, setup.hidden, random);
      PlanOptions options = {.layout = layout, .order = SumOrder::kTopk};
      options.balance = {.replicas = 2, .placement = {kPlacement.begin(), kPlacement.end()}};
      const Plan plan = exchange.plan({.topk_idx = idx.view()}, options);
      Matrix rows(DType::kFloat32, plan.num_rows(), setup.hidden);
      Matrix out(DType::kFloat32, plan.num_tokens(), setup.hidden);
      exchange.dispatch(plan, {.x = x.view()}, {.rows = rows.view()});
      run_experts(plan, rows.as<float>(), setup.hidden);
      exchange.combine(plan, {.rows = rows.view()}, {.x = out.view()});
      std::string problem = plan.routes_per_expert()[4] > 0 ? "" : "expert 4 got nothing";
      for (size_t i = 0; i < out.num_elements(); ++i) {
        const size_t token = i / static_cast<size_t>(setup.hidden);
        float sum = 0;
        for (size_t k = token * 4; k < token * 4 + 4; ++k) {
          const int32_t expert = table.expert[k];
          sum += expert == 5 ? 0 : x.as<float>()[i] * static_cast<float>(expert + 1);
        }
        if (sum != out.as<float>()[i]) {
          problem = fmt::format("element {} is {}, not {}", i, out.as<float>()[i], sum);
        }
      }
      return verdict(problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL, 0}));
  }
}

// A rank that joins again knows no placement, so the others forget theirs until the next plan.
TEST(TakeoverTest, ARankThatJoinsAgainHearsOfTheSameLostExperts) {
  const ExchangeSetup setup = setup_of(4, "loopback");
  PlanOptions options;
  options.balance = {.replicas = 2, .placement = {kPlacement.begin(), kPlacement.end()}};
  run_threads(4, [&](const Group& group) {
    std::optional<Exchange> exchange(shrinking(group, setup));
    const std::string invitation = exchange->invitation();
    const Matrix idx(DType::kInt32, 0, 4);
    const auto plan = [&] {
      static_cast<void>(exchange->plan({.topk_idx = idx.view()}, options));
      return text(exchange->report().lost_experts);
    };
    group.barrier();
    if (group.rank() == 1 || group.rank() == 2) {
      exchange.reset();
    } else {
      EXPECT_EQ(plan(), "3,5");
      EXPECT_EQ(text(exchange->report().alive), "0,3");
    }
    group.barrier();
    if (group.rank() == 2) {
      return;
    }
    if (group.rank() == 1) {
      exchange.emplace(shrinking(Group::rejoin(1, invitation), setup));
    } else {
      exchange->readmit(std::vector<int>{1});
    }
    EXPECT_EQ(text(exchange->report().alive), "0,1,3");
    EXPECT_EQ(text(exchange->report().lost_experts), "4,5");
    EXPECT_EQ(plan(), "5");
  });
}

}  // namespace
}  // namespace weft::test
