// SPDX-License-Identifier: Apache-2.0
// GPUs that go on without ranks that are lost (PeerLoss::kShrink), of one host and in two domains.
// Ranks are processes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "core/gpu/devices.hpp"
#include "gpu/fault_world.hpp"
#include "gpu/gpu_test.hpp"
#include "gpu/graph_rank.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"
#include "survivors/gpu_deaths.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 3;

// A case of which ranks take no part.
CaseData case_without(const ExchangeSetup& setup, const std::vector<int>& lost) {
  Case spec;
  spec.num_tokens = {20, 30, 25};
  spec.dtype = DType::kBFloat16;
  spec.lost = lost;
  for (const int rank : lost) {
    spec.num_tokens[static_cast<size_t>(rank)] = 0;
  }
  return make_case_data(setup, spec);
}

// Returns 0 if a rank that makes a call when the others have given it up is told so, else 1.
int status_of_given_up(Exchange& exchange, const CaseData& data) {
  const auto heard = thrown_by([&] { static_cast<void>(run_cases(exchange, {&data, 1})); });
  const bool is_told =
      heard && heard->is_peer_error && heard->text.find("was given up by") != std::string::npos;
  if (!is_told) {
    fmt::print(stderr, "rank 1 heard '{}'\n", text_of(heard));
  }
  return is_told ? 0 : 1;
}

// Fixture of the tests with a parameter and of those without.
template <class Base>
class SurvivalOf : public Base {
 protected:
  void SetUp() override {
    set_many_connections();
    const auto count = [](const Group&) { return static_cast<int>(list_gpus().gpus.size()); };
    num_gpus_ = run_forked(1, count)[0];  // whoever has used CUDA must not fork ranks that use it
    if (num_gpus_ == 0) {
      GTEST_SKIP() << "no GPU";
    }
  }

  [[nodiscard]] ExchangeSetup setup(std::chrono::milliseconds timeout = 20s) const {
    ExchangeSetup setup = gpu_setup(kRanks, num_gpus_);
    setup.domain_of = domain_of_;
    setup.transport = "ofi";
    setup.timeout = timeout;
    return setup;
  }

  static Exchange shrinking(
      const Group& group,
      const ExchangeSetup& setup,
      const std::function<void(const CallReport&)>& on_loss = {}
  ) {
    ExchangeConfig config = setup.config(group.rank());
    config.on_peer_loss = PeerLoss::kShrink;
    config.on_loss = on_loss;
    return make_exchange(group, setup, config);
  }

  // All ranks make a round; then `end` is called on rank 1, which returns whether it goes on; the
  // others hear that it is lost, and make a round without it. `begin`: by all before `end`.
  static void expect_the_rest_goes_on(
      const ExchangeSetup& setup,
      const std::function<int(const Group&, std::optional<Exchange>&)>& end,
      int status_of_ended = 0,
      const std::function<void(const Group&, Exchange&)>& between = {}
  ) {
    const CaseData all = case_without(setup, {});
    const CaseData rest = case_without(setup, {1});
    const auto live = [&](const Group& group) -> std::string {
      std::vector<int> told;
      std::optional<Exchange> exchange =
          shrinking(group, setup, [&](const CallReport& report) { told = report.lost; });
      if (const std::string problem = run_cases(*exchange, {&all, 1}); !problem.empty()) {
        return problem;
      }
      group.barrier();
      if (group.rank() == 1) {
        return end(group, exchange) == 0 ? "" : "the rank that ends has failed";
      }
      if (between) {
        between(group, *exchange);
      }
      std::string heard;
      for (bool is_lost = false; !is_lost;) {
        try {
          if (const std::string problem = run_cases(*exchange, {&all, 1}); !problem.empty()) {
            return problem;
          }
        } catch (const Error& error) {
          heard = error.what();
          is_lost = error.code() == ErrorCode::kRanksLost;
          if (!is_lost) {
            return heard;
          }
        }
      }
      const CallReport report = exchange->report();
      if (heard.find("rank 1 is lost; 2 of 3 ranks go on") == std::string::npos ||
          told != std::vector{1} || report.lost != told || report.alive != std::vector{0, 2} ||
          report.lost_experts != std::vector<int>{4, 5, 6, 7} || report.epoch != 1) {
        return fmt::format("heard '{}', told {}", heard, fmt::join(told, ","));
      }
      for (int i = 0; i < 3; ++i) {
        if (const std::string problem = run_cases(*exchange, {&rest, 1}); !problem.empty()) {
          return problem;
        }
      }
      return "";
    };
    const auto statuses = run_forked(kRanks, [&](const Group& group) {
      const std::string problem = live(group);
      if (!problem.empty()) {
        fmt::print(stderr, "rank {}: {}\n", group.rank(), problem);
      }
      return problem.empty() ? 0 : 1;
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, status_of_ended, 0}));
  }

  int num_gpus_ = 0;
  std::vector<int> domain_of_ = {};  // empty: one
};

// Tests whose parameter is the domain of each rank.
class GpuSurvivalTest : public SurvivalOf<testing::TestWithParam<std::vector<int>>> {
 protected:
  void SetUp() override {
    SurvivalOf::SetUp();
    domain_of_ = GetParam();
  }
};
INSTANTIATE_TEST_SUITE_P(
    All,
    GpuSurvivalTest,
    testing::Values(std::vector<int>{}, std::vector<int>{0, 1, 1}, std::vector<int>{0, 1, 0}),
    [](const auto& parameter) {
      return parameter.param.empty()       ? "OneHost"
             : parameter.param.back() == 1 ? "LostOfTwo"
                                           : "LostAlone";
    }
);

// Tests of what only GPUs of one host can do, or are told.
class GpuHostSurvivalTest : public SurvivalOf<testing::Test> {};

// Four ranks in domains of other sizes.
class GpuDomainsSurvivalTest : public SurvivalOf<testing::Test> {};

TEST_F(GpuHostSurvivalTest, TheRestGoesOnWhenRanksAreKilled) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const GroupOfDeaths group = run_deaths({.num_gpus = num_gpus_, .seed = seed});
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

TEST_F(GpuHostSurvivalTest, ReplayedGraphsGoOnWhenRanksAreKilled) {
  for (uint64_t seed = 11; seed <= 13; ++seed) {
    const GroupOfDeaths group =
        run_deaths({.num_gpus = num_gpus_, .seed = seed, .is_replayed = true});
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

// Also when new processes come, who have made no calls by copy engines.
TEST_F(GpuHostSurvivalTest, CallsByCopyEnginesGoOnWhenRanksAreKilled) {
  for (uint64_t seed = 61; seed <= 64; ++seed) {
    const GroupOfDeaths group = run_deaths(
        {.num_gpus = num_gpus_,
         .seed = seed,
         .num_returns = seed > 62 ? 3 : 0,
         .copy_engines = true}
    );
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

TEST_F(GpuHostSurvivalTest, NewProcessesTakeThePlacesOfThoseThatAreKilled) {
  for (uint64_t seed = 21; seed <= 23; ++seed) {
    const GroupOfDeaths group =
        run_deaths({.num_ranks = 3, .num_gpus = num_gpus_, .seed = seed, .num_returns = 4});
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

TEST_F(GpuDomainsSurvivalTest, TheRestGoesOnWhenRanksAreKilled) {
  const std::vector<std::vector<int>> worlds = {{0, 0, 1, 1}, {0, 1, 1, 2}, {0, 1, 0, 1}};
  for (uint64_t seed = 41; seed <= 43; ++seed) {
    const GroupOfDeaths group = run_deaths(
        {.num_gpus = num_gpus_, .seed = seed, .domain_of = worlds[static_cast<size_t>(seed - 41)]}
    );
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

TEST_F(GpuDomainsSurvivalTest, NewProcessesTakeThePlacesOfThoseThatAreKilled) {
  for (uint64_t seed = 51; seed <= 52; ++seed) {
    const GroupOfDeaths group = run_deaths(
        {.num_ranks = 3,
         .num_gpus = num_gpus_,
         .seed = seed,
         .num_returns = 3,
         .domain_of = seed == 51 ? std::vector{0, 0, 1} : std::vector{0, 1, 2}}
    );
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << "seed " << seed;
  }
}

// A new process's memory is at the old addresses by VMM; by CUDA IPC graphs are captured again.
TEST_F(GpuHostSurvivalTest, ReplayedGraphsGoOnWithNewProcesses) {
  for (const char* const transport : {"vmm", "ipc"}) {
    const GroupOfDeaths group = run_deaths(
        {.num_ranks = 3,
         .num_gpus = num_gpus_,
         .seed = 31,
         .is_replayed = true,
         .num_returns = 3,
         .transport = transport}
    );
    EXPECT_EQ(group.num_wrong + group.num_hung, 0) << transport;
  }
}

TEST_F(GpuHostSurvivalTest, AGraphThatKnowsOldAddressesIsRefused) {
  const ExchangeSetup own = setup();
  Case spec;
  spec.num_tokens = {20, 30, 25};
  spec.dtype = DType::kBFloat16;
  spec.rows = 240;
  const CaseData all = make_case_data(own, spec);
  const Shared<Letter> letter;
  const auto play = [&](Exchange& exchange) {
    return run_cases(exchange, {&all, 1}) + run_cases(exchange, {&all, 1});
  };
  const Spare spare([&] {
    ::setenv("WEFT_GPU_TRANSPORT", "ipc", 1);
    reach_gpu(own, 1);
    Exchange exchange = shrinking(Group::rejoin(1, letter->await()), own);
    const std::string problem = play(exchange);
    fmt::print(stderr, "{}", problem);
    return problem.empty() ? 0 : 1;
  });
  const auto statuses = run_forked(kRanks, [&](const Group& group) {
    ::setenv("WEFT_GPU_TRANSPORT", "ipc", 1);
    Exchange exchange = shrinking(group, own);
    const TestStream stream(exchange.config().device);
    GraphRank rank(exchange, all);
    rank.make_calls(all, stream.get());
    stream.wait();
    const Graph graph(stream, [&] { rank.make_calls(all, stream.get()); });
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    const auto replay = [&] {
      graph.launch();
      stream.wait();
      exchange.check();
    };
    std::string heard;
    while (heard.empty()) {
      heard = text_of(thrown_by(replay));
    }
    std::string problem = heard.find("rank 1 is lost") == std::string::npos ? heard : "";
    if (group.rank() == 2) {
      letter->send(exchange);
    }
    exchange.readmit(std::array{1});
    for (int i = 0; i < 2; ++i) {
      heard = text_of(thrown_by(replay));
      problem += heard.find("captured before a lost rank came back") == std::string::npos
                     ? "heard '" + heard + "'; "
                     : "";
    }
    problem += play(exchange);
    fmt::print(stderr, "{}", problem);
    return problem.empty() ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  EXPECT_EQ(spare.status(), 0);
}

TEST_F(GpuHostSurvivalTest, SaysWhyARankCannotComeBack) {
  const ExchangeSetup own = setup(3s);
  const CaseData all = case_without(own, {});
  const CaseData rest = case_without(own, {1});
  const Shared<Letter> letter;
  const Shared<std::atomic<pid_t>> masked;
  const Spare spare([&] {  // has another config, and is told so
    ExchangeSetup other = own;
    other.max_tokens *= 2;
    reach_gpu(other, 1);
    const Group group = Group::rejoin(1, letter->await());
    const std::string heard =
        text_of(thrown_by([&] { const Exchange exchange = shrinking(group, other); }));
    fmt::print(stderr, "{}", heard.find("those of the others") == std::string::npos ? heard : "");
    return heard.find("those of the others") == std::string::npos ? 1 : 0;
  });
  const auto statuses = run_forked(kRanks, [&](const Group& group) {
    Exchange exchange = shrinking(group, own);
    std::string problem = run_cases(exchange, {&all, 1});
    group.barrier();
    if (group.rank() == 1) {
      *masked = ::getpid();
      static_cast<void>(::raise(SIGSTOP));
      return 1;
    }
    if (group.rank() == 0) {
      exchange.mask(std::array{1});
    }
    std::string heard;
    while (heard.empty()) {
      heard = text_of(thrown_by([&] { problem += run_cases(exchange, {&all, 1}); }));
    }
    const auto back = [&] { return text_of(thrown_by([&] { exchange.readmit(std::array{1}); })); };
    const std::string alive = back();
    problem += alive.find("has not ended within 3.0 s, and may still write") != std::string::npos
                   ? ""
                   : "heard '" + alive + "'; ";
    if (group.rank() == 0) {
      static_cast<void>(::kill(*masked, SIGKILL));
      letter->send(exchange);
    }
    const std::string lost = back();
    problem +=
        lost.find("rank 1 was lost again") != std::string::npos ? "" : "heard '" + lost + "'; ";
    problem += run_cases(exchange, {&rest, 1});
    fmt::print(stderr, "{}", problem);
    return problem.empty() ? 0 : 2;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  EXPECT_EQ(spare.status(), 0);
}

TEST_P(GpuSurvivalTest, TheRestGoesOnWhenARankLeaves) {
  expect_the_rest_goes_on(setup(), [](const Group&, std::optional<Exchange>& exchange) {
    exchange.reset();
    return 0;
  });
}

// Nothing of it is taken for new when it goes on.
TEST_P(GpuSurvivalTest, AStoppedRankIsGivenUpAndRefusedWhenItComesBack) {
  const ExchangeSetup own = setup(4s);
  const CaseData all = case_without(own, {});
  const auto stop = [&](const Group&, std::optional<Exchange>& exchange) {
    const pid_t pid = ::getpid();
    const pid_t waker = ::fork();
    if (waker == 0) {
      std::this_thread::sleep_for(12s);
      static_cast<void>(::kill(pid, SIGCONT));
      ::_exit(0);
    }
    static_cast<void>(::raise(SIGSTOP));
    return status_of_given_up(*exchange, all);
  };
  expect_the_rest_goes_on(own, stop);
}

// It lives, and its memory can be reached.
TEST_P(GpuSurvivalTest, ARankThatMakesNoCallsIsGivenUp) {
  const ExchangeSetup own = setup(4s);
  const CaseData all = case_without(own, {});
  const auto sleep = [&](const Group&, std::optional<Exchange>& exchange) {
    std::this_thread::sleep_for(12s);
    return status_of_given_up(*exchange, all);
  };
  expect_the_rest_goes_on(own, sleep);
}

TEST_P(GpuSurvivalTest, AMaskedRankIsLost) {
  const ExchangeSetup own = setup();
  const CaseData all = case_without(own, {});
  const auto go_on = [&](const Group&, std::optional<Exchange>& exchange) {
    for (;;) {
      const auto heard = thrown_by([&] { static_cast<void>(run_cases(*exchange, {&all, 1})); });
      if (heard) {
        return heard->is_peer_error ? 0 : 1;
      }
    }
  };
  const auto mask = [](const Group& group, Exchange& exchange) {
    if (group.rank() == 0) {
      exchange.mask(std::array{1});
    }
  };
  expect_the_rest_goes_on(own, go_on, 0, mask);
}

TEST_P(GpuSurvivalTest, PlansFromBeforeAreRefused) {
  const ExchangeSetup own = setup();
  const CaseData data = case_without(own, {});
  const auto statuses = run_forked(kRanks, [&](const Group& group) {
    std::optional<Exchange> exchange = shrinking(group, own);
    FaultRank rank(*exchange, data);
    rank.make_plan();
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    const auto dispatch = [&] {
      exchange->dispatch(*rank.plan, rank.dispatch_in, rank.dispatch_out);
    };
    const std::string lost = text_of(thrown_by(dispatch));
    const std::string old = text_of(thrown_by(dispatch));
    const bool is_good =
        lost.find("rank 1 is lost") != std::string::npos &&
        old.find("ranks were lost or came back since the plan was made") != std::string::npos;
    if (!is_good) {
      fmt::print(stderr, "rank {} heard '{}', then '{}'\n", group.rank(), lost, old);
      return 1;
    }
    rank.make_plan();
    const Plan& plan = *rank.plan;
    return exchange->report().void_calls <= 1 && plan.num_tokens() > 0 ? 0 : 2;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

// Each would wait for the other in its own until the deadline.
TEST_P(GpuSurvivalTest, RanksThatComeToDifferentExchangesFirstGoOnInBoth) {
  const ExchangeSetup own = setup();
  const CaseData all = case_without(own, {});
  const CaseData rest = case_without(own, {1});
  const auto live = [&](const Group& group) -> std::string {
    std::array<Exchange, 2> exchanges = {shrinking(group, own), shrinking(group, own)};
    for (Exchange& exchange : exchanges) {
      if (const std::string problem = run_cases(exchange, {&all, 1}); !problem.empty()) {
        return problem;
      }
    }
    group.barrier();
    if (group.rank() == 1) {
      static_cast<void>(::raise(SIGKILL));
    }
    const size_t first = group.rank() == 0 ? 0 : 1;
    for (const size_t i : {first, 1 - first}) {
      std::string problem;
      std::optional<Thrown> heard;
      while (!heard && problem.empty()) {
        heard = thrown_by([&] { problem = run_cases(exchanges[i], {&all, 1}); });
      }
      if (!heard || heard->code != ErrorCode::kRanksLost) {
        return problem + text_of(heard);
      }
    }
    std::string problem;
    for (Exchange& exchange : exchanges) {
      problem += run_cases(exchange, {&rest, 1});
    }
    return problem;
  };
  const auto statuses = run_forked(kRanks, [&](const Group& group) {
    const std::string problem = live(group);
    if (!problem.empty()) {
      fmt::print(stderr, "rank {}: {}\n", group.rank(), problem);
    }
    return problem.empty() ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

TEST_F(GpuHostSurvivalTest, IsRefusedWhereItCannotBe) {
  const ExchangeSetup own = setup();
  const auto statuses = run_forked(2, [&](const Group& group) {
    ExchangeSetup two = own;
    two.num_ranks = 2;
    Exchange exchange = shrinking(group, two);
    const std::string grown = text_of(thrown_by([&] { static_cast<void>(exchange.grow(1, 1)); }));
    const std::string back = text_of(thrown_by([&] { exchange.readmit(std::array{0}); }));
    const std::string self =
        text_of(thrown_by([&] { exchange.mask(std::array{exchange.rank()}); }));
    const bool is_good = grown.find("keeps its size") != std::string::npos &&
                         back.find("expected ranks that are lost; 2 of 2") != std::string::npos &&
                         self.find("expected others of the 2 ranks") != std::string::npos;
    if (!is_good) {
      fmt::print(stderr, "heard '{}', '{}', '{}'\n", grown, back, self);
    }
    group.barrier();
    return is_good ? 0 : 1;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace weft::test
