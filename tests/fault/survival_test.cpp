// SPDX-License-Identifier: Apache-2.0
// PeerLoss::kShrink: ranks die, leave, are stopped and given up, and the others go on with the bits
// of a group that never had them.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <optional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "fault/survival_cases.hpp"
#include "support/errors.hpp"
#include "survivors/shared.hpp"
#include "survivors/storm.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

// How ranks agree: by memory that they share, or by messages.
struct Way {
  const char* name;
  const char* transport;
  int ranks_per_domain;  // 0: all are in one
};

class SurvivalTest : public testing::TestWithParam<Way> {
 protected:
  [[nodiscard]] static ExchangeSetup setup(int num_ranks) {
    ExchangeSetup setup = setup_of(num_ranks, GetParam().transport);
    for (int rank = 0; rank < num_ranks && GetParam().ranks_per_domain > 0; ++rank) {
      setup.domain_of.push_back(rank / GetParam().ranks_per_domain);
    }
    return setup;
  }
};

constexpr Way kShm = {"Shm", "shm", 0};
constexpr Way kOfi = {"Ofi", "ofi:tcp", 1};
constexpr Way kOfiOfTwo = {"OfiOfTwo", "ofi:tcp", 2};
constexpr Way kDomains = {"Domains", "domains:tcp", 2};  // shared memory in each
constexpr auto kNameOf = [](const auto& one) { return std::string(one.param.name); };
INSTANTIATE_TEST_SUITE_P(Ways, SurvivalTest, testing::Values(kShm, kOfi), kNameOf);

class StepsSurvivalTest : public SurvivalTest {
 protected:
  void SetUp() override {
    if (std::string_view(GetParam().name) == kDomains.name) {
      ::setenv("WEFT_RANKS_PER_DOMAIN", "2", 1);
    }
  }
  void TearDown() override { ::unsetenv("WEFT_RANKS_PER_DOMAIN"); }
};
INSTANTIATE_TEST_SUITE_P(
    Ways, StepsSurvivalTest, testing::Values(kShm, kOfi, kOfiOfTwo, kDomains), kNameOf
);

TEST_P(StepsSurvivalTest, TheRestGoesOnWhenARankIsKilled) {
  const ExchangeSetup setup = this->setup(4);
  const std::vector<Case> specs = cases();
  // Between domains each exchange takes half a second to make, and so some of the pairs must do.
  const size_t stride = setup.domain_of.empty() ? 1 : 2;
  for (size_t i = 0; i < 3 * specs.size(); i += stride) {
    const SurvivorRounds rounds(setup, specs[i / 3]);
    const auto statuses = run_forked(setup.num_ranks, [&](const Group& group) {
      std::vector<int> heard;
      Exchange exchange =
          shrinking(group, setup, [&](const CallReport& report) { heard = report.lost; });
      std::string problem;
      for (uint64_t round = 0; round < kNumRounds && problem.empty(); ++round) {
        problem = rounds.run(exchange, round, [&](int call) {
          if (group.rank() == 2 && round == 1 && call == static_cast<int>(i % 3)) {
            std::raise(SIGKILL);
          }
        });
      }
      if (problem.empty() && (text(exchange.report().alive) != "0,1,3" || text(heard) != "2")) {
        problem = fmt::format("alive {}, lost {}", text(exchange.report().alive), text(heard));
      }
      return verdict(problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL, 0})) << "step " << i;
  }
}

// The kernel takes a dying process's memory away before anybody can see its end, and on a busy host
// long before.
TEST(HostSurvivalTest, TheRestGoesOnWhenMemoryIsGoneLongBeforeItsProcess) {
  const ExchangeSetup setup = setup_of(3, "shm");
  const SurvivorRounds rounds(setup, {});
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    group.barrier();
    const auto lose_memory = [&](int call) {
      if (group.rank() != 1 || call != 1) {
        return;
      }
      std::vector<int> files;
      for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code none;
        const auto to = std::filesystem::read_symlink(entry.path(), none).string();
        if (to.starts_with("/memfd:weft")) {
          files.push_back(std::stoi(entry.path().filename().string()));
        }
      }
      std::ranges::for_each(files, [](int file) { ::close(file); });
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::seconds(2));
        std::raise(SIGKILL);
      }).detach();
    };
    std::string problem = rounds.run(exchange, 1, lose_memory);
    problem += rounds.run(exchange, 2);
    return verdict(text(exchange.report().alive) == "0,2" ? problem : problem + "; not lost");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

TEST(HostSurvivalTest, TheRestGoesOnWhenAThreadLeaves) {
  const ExchangeSetup setup = setup_of(3, "loopback");
  for (const Case& spec : cases()) {
    const SurvivorRounds rounds(setup, spec);
    std::vector<std::string> problems(3);
    run_threads(3, [&](const Group& group) {
      const auto rank = static_cast<size_t>(group.rank());
      std::optional<Exchange> exchange(shrinking(group, setup));
      for (uint64_t round = 0; round < kNumRounds && exchange; ++round) {
        problems[rank] += rounds.run(*exchange, round);
        if (rank == round) {  // 0, then 1; the last goes on alone
          if (round < 2) {
            exchange.reset();
          }
        }
      }
    });
    EXPECT_EQ(problems, std::vector<std::string>(3));
  }
}

// A loss inside of a call that one rank refuses: all are told of the refusal and of the loss.
TEST_P(SurvivalTest, ARefusedCallEndsOnAllThatAreLeft) {
  const ExchangeSetup setup = this->setup(3);
  const SurvivorRounds rounds(setup, {});
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 1);
    if (group.rank() == 0) {
      std::raise(SIGKILL);
    }
    const Matrix idx(DType::kInt32, 5, 4);  // no experts
    const auto thrown = thrown_by([&] {
      if (group.rank() == 1) {
        exchange.refuse(Op::kPlan, "no time");
      } else {
        Matrix right(DType::kInt32, 5, 4);
        std::fill_n(right.as<int32_t>(), right.num_elements(), 1);
        static_cast<void>(exchange.plan({.topk_idx = right.view()}));
      }
    });
    const bool is_told =
        group.rank() == 1 ? !thrown : text_of(thrown).find("no time") != text_of(thrown).npos;
    if (!is_told || text(exchange.report().lost) != "0") {
      problem += fmt::format("{}; lost {}", text_of(thrown), text(exchange.report().lost));
    }
    problem += rounds.run(exchange, 2);
    return verdict(problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{128 + SIGKILL, 0, 0}));
}

// A call that plans and dispatches is one call to whoever asks whom it has lost.
TEST_P(SurvivalTest, ACallInTwoPartsTellsOnceOfRanksLostInTheFirst) {
  const ExchangeSetup setup = this->setup(3);
  const auto statuses = run_forked(3, [&](const Group& group) {
    std::vector<std::string> heard;
    Exchange exchange = shrinking(group, setup, [&](const CallReport& report) {
      heard.push_back(text(report.lost));
    });
    group.barrier();
    if (group.rank() == 0) {
      std::raise(SIGKILL);
    }
    Matrix idx(DType::kInt32, 5, 4);
    std::fill_n(idx.as<int32_t>(), idx.num_elements(), setup.num_experts - 1);
    const Matrix x(DType::kBFloat16, 5, setup.hidden);
    Matrix rows(DType::kBFloat16, 40, setup.hidden);
    const PlanOptions options = {.row_budget = rows.view().rows};
    static_cast<void>(
        exchange.dispatch({.topk_idx = idx.view()}, options, {.x = x.view()}, {.rows = rows.view()})
    );
    const std::string told =
        fmt::format("{}; {}", fmt::join(heard, ", "), text(exchange.report().lost));
    return verdict(told == "0; 0" ? "" : told);
  });
  EXPECT_EQ(statuses, (std::vector<int>{128 + SIGKILL, 0, 0}));
}

// A rank that is stopped in a call is given up at the deadline; when it comes back, it is told so
// and changes nothing.
TEST_P(SurvivalTest, AStoppedRankIsGivenUpAndRefusedWhenItComesBack) {
  ExchangeSetup setup = this->setup(3);
  for (int step = 0; step < 3; ++step) {
    const SurvivorRounds rounds(setup, cases()[static_cast<size_t>(step)]);
    const Shared<std::atomic<pid_t>> stopped;
    const auto statuses = run_forked(3, [&](const Group& group) {
      setup.timeout = std::chrono::seconds(group.rank() == 1 ? 60 : 2);
      Exchange exchange = shrinking(group, setup);
      std::string problem;
      const auto thrown = thrown_by([&] {
        for (uint64_t round = 0; round < kNumRounds && problem.empty(); ++round) {
          problem = rounds.run(exchange, round, [&](int call) {
            if (group.rank() == 1 && round == 1 && call == step) {
              stopped->store(::getpid());
              std::raise(SIGSTOP);
            }
            if (group.rank() == 0 && round == 2 && call == 0) {
              ::kill(stopped->load(), SIGCONT);
            }
          });
        }
      });
      const bool is_as_expected =
          group.rank() == 1
              ? thrown && thrown->is_peer_error &&
                    text_of(thrown).find("was given up by the others") != text_of(thrown).npos
              : !thrown && text(exchange.report().alive) == "0,2";
      if (!is_as_expected) {
        problem += fmt::format("{}; alive {}", text_of(thrown), text(exchange.report().alive));
      }
      return verdict(problem);
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0})) << "step " << step;
  }
}

// It has looked since the others began to wait, so that their deadline does not tell yet who it is.
TEST_P(SurvivalTest, ARankThatStopsWhileOthersWaitIsGivenUpToo) {
  ExchangeSetup setup = this->setup(3);
  const Shared<std::atomic<pid_t>> stopped;
  const auto statuses = run_forked(3, [&](const Group& group) {
    const bool stops = group.rank() == 1;
    setup.timeout = std::chrono::seconds(stops ? 60 : 3);
    Exchange exchange = shrinking(group, setup);
    Matrix idx(DType::kInt32, 6, 1);
    std::iota(idx.as<int32_t>(), idx.as<int32_t>() + idx.num_elements(), 0);
    const Plan plan = exchange.plan({.topk_idx = idx.view()}, {.layout = Layout::kExpertStrided});
    const Matrix rows(DType::kFloat32, plan.num_rows(), setup.hidden);
    Matrix x(DType::kFloat32, plan.num_tokens(), setup.hidden);
    Matrix marks(DType::kInt32, 1, setup.num_experts / setup.num_ranks);
    std::fill_n(marks.as<int32_t>(), marks.num_elements(), stops ? 0 : 1);
    if (stops) {  // while it looks, and waits for marks that do not come
      stopped->store(::getpid());
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        ::kill(::getpid(), SIGSTOP);
      }).detach();
    }
    const auto thrown = thrown_by([&] {
      exchange.combine(
          plan,
          {.rows = rows.view(), .ready = {.marks = std::as_const(marks).view(), .wanted = 1}},
          {.x = x.view()}
      );
    });
    if (group.rank() == 0) {
      ::kill(stopped->load(), SIGCONT);
    }
    const bool is_as_expected =
        stops ? thrown && thrown->is_peer_error : !thrown && text(exchange.report().alive) == "0,2";
    return verdict(is_as_expected ? "" : text_of(thrown));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST_P(SurvivalTest, ACallerMayGiveARankUp) {
  const ExchangeSetup setup = this->setup(3);
  const SurvivorRounds rounds(setup, {});
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 1);
    group.barrier();
    if (group.rank() == 2) {
      exchange.mask(std::vector<int>{0});
    }
    const auto thrown = thrown_by([&] { problem += rounds.run(exchange, 2); });
    if (group.rank() == 0 ? !thrown || !thrown->is_peer_error
                          : thrown || text(exchange.report().alive) != "1,2") {
      problem += text_of(thrown);
    }
    const auto wrong = thrown_by([&] { exchange.mask(std::vector<int>{group.rank()}); });
    if (group.rank() != 0 && (!wrong || wrong->code != ErrorCode::kInvalidArgument)) {
      problem += text_of(wrong);
    }
    return verdict(problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0}));
}

TEST_P(SurvivalTest, CallersMayGiveRanksUpAtTheSameTime) {
  const ExchangeSetup setup = this->setup(4);
  const SurvivorRounds rounds(setup, {});
  const auto statuses = run_forked(4, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    for (int rank = 0; rank < 2; ++rank) {  // the second one has not heard of the first
      group.barrier();
      if (group.rank() == rank) {
        exchange.mask(std::vector<int>{rank + 2});
      }
    }
    group.barrier();
    std::string problem;
    const auto thrown = thrown_by([&] { problem = rounds.run(exchange, 1); });
    const bool is_as_expected = group.rank() < 2
                                    ? !thrown && text(exchange.report().lost).empty() &&
                                          text(exchange.report().alive) == "0,1"
                                    : thrown && thrown->is_peer_error;
    return verdict(is_as_expected ? problem : text_of(thrown));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0, 0}));
}

TEST(HostSurvivalTest, IsRefusedWhereItCannotBe) {
  run_threads(2, [&](const Group& group) {
    Exchange exchange(group, setup_of(2, "loopback").config());
    const std::vector<int> other = {1 - group.rank()};
    EXPECT_EQ(thrown_by([&] { exchange.mask(other); })->code, ErrorCode::kUnsupported);
    EXPECT_EQ(text(exchange.report().alive), "0,1");
    Exchange threads = shrinking(group, setup_of(2, "loopback"));
    EXPECT_EQ(thrown_by([&] { threads.mask(other); })->code, ErrorCode::kUnsupported);
    group.barrier();
    ExchangeConfig config = setup_of(2, "loopback").config();
    config.on_peer_loss = group.rank() == 0 ? PeerLoss::kShrink : PeerLoss::kFail;
    EXPECT_NE(
        text_of(thrown_by([&] { Exchange(group, config); })).find("on_peer_loss"), std::string::npos
    );
  });
}

// Deaths at any moment, several in a run and during recovery too, until one rank is left; in some
// storms all that are lost are called back, and lost again.
TEST(HostSurvivalTest, AStormOfDeaths) {
  const StormCount count = run_storms(100, {.stops = 0});
  EXPECT_GE(count.lost(), 100);
  EXPECT_EQ(count.wrong + count.hung, 0) << "stderr names the seed";
  EXPECT_GT(count.killed, 0);
  EXPECT_GT(count.left, 0);
  EXPECT_GT(count.masked, 0);
  EXPECT_GT(count.returned, 0);
}

}  // namespace
}  // namespace weft::test
