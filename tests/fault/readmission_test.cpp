// SPDX-License-Identifier: Apache-2.0
// Exchange::readmit: new processes take the places of lost ranks, or are lost themselves while they
// do, and whatever comes of it is the same on all that are left.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <optional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "fault/survival_cases.hpp"
#include "support/errors.hpp"
#include "support/process_memory.hpp"
#include "survive/shared_roll.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

class ReadmissionTest : public testing::Test {};

// Takes a place as a new process does until it is a member, and goes no further.
void take_place(int rank, const char* invitation) {
  SharedRoll roll(make_shm_memory(), Group::rejoin(rank, invitation));
  roll.be_next(roll.members());
  roll.ask(true);
  while (!roll.is_in(roll.members())) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Rank 2 dies, the others go on, and the next process takes its place, again and again.
TEST_F(ReadmissionTest, ANewProcessTakesThePlaceOfALostRank) {
  constexpr int kNumLives = 4;
  struct Board {
    std::array<std::array<char, 2048>, kNumLives> invitation = {};
    std::array<std::atomic<bool>, kNumLives> is_there = {};
  };
  const ExchangeSetup setup = setup_of(4, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<Board> board;
  // Runs the rounds of one life of rank 2; all lives but the last end in their second round.
  const auto live = [&](Exchange& exchange, int life) {
    const auto seed = static_cast<uint64_t>(10 * life);
    const bool is_mortal = exchange.rank() == 2 && life + 1 < kNumLives;
    std::string problem = rounds.run(exchange, seed);
    problem += rounds.run(exchange, seed + 1, [&](int call) {
      if (is_mortal && call == 1) {
        std::raise(SIGKILL);
      }
    });
    return problem + rounds.run(exchange, seed + 2);
  };
  std::vector<pid_t> spares;
  for (int life = 1; life < kNumLives; ++life) {
    const auto at = static_cast<size_t>(life);
    const pid_t spare = ::fork();
    if (spare == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (!board->is_there[at].load()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const Group group = Group::rejoin(2, board->invitation[at].data());
      std::string problem;
      const auto thrown = thrown_by([&] {
        Exchange exchange = shrinking(group, setup);
        exchange.refuse(Op::kCombine, "a plan that this rank does not have");
        problem = live(exchange, life);
      });
      ::_exit(verdict(thrown ? text_of(thrown) : problem));
    }
    spares.push_back(spare);
  }
  const auto statuses = run_forked(4, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem = live(exchange, 0);
    std::optional<int64_t> mappings;
    for (int life = 1; life < kNumLives; ++life) {
      const auto at = static_cast<size_t>(life);
      const Matrix idx(DType::kInt32, 0, 4);
      const Plan old = exchange.plan({.topk_idx = idx.view()});
      if (group.rank() == 3) {  // whose word counts as well as that of the first
        exchange.invitation().copy(board->invitation[at].data(), 2047);
        board->is_there[at].store(true);
      }
      exchange.readmit(std::vector<int>{2});
      const Matrix none(DType::kFloat32, 0, setup.hidden);
      const auto thrown = thrown_by([&] { exchange.combine(old, {.rows = none.view()}, {}); });
      if (text_of(thrown).find("from before ranks joined again") == std::string::npos) {
        problem += text_of(thrown);
      }
      problem += live(exchange, life);
      const int64_t now = measure_process_memory().num_shared_mappings;
      if (life + 1 < kNumLives && now != mappings.value_or(now)) {
        problem += fmt::format("{} shared mappings, {} before", now, *mappings);
      }
      mappings = now;
    }
    return verdict(problem);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0, 128 + SIGKILL, 0}));
  for (size_t i = 0; i < spares.size(); ++i) {
    int status = 0;
    ::waitpid(spares[i], &status, 0);
    const bool is_last = i + 1 == spares.size();
    EXPECT_TRUE(is_last ? WIFEXITED(status) && WEXITSTATUS(status) == 0 : WIFSIGNALED(status))
        << "life " << i + 1;
  }
}

// A rank that was given up may live on when a new process has its place: it hears of it or not.
TEST_F(ReadmissionTest, WhoHasLostItsPlaceToANewProcessChangesNothing) {
  struct Board {
    std::array<char, 2048> invitation = {};
    std::atomic<bool> is_there = false;
    std::atomic<bool> is_back = false;
    std::atomic<bool> is_gone = false;
    std::atomic<pid_t> old = 0;
  };
  const auto await = [](const std::atomic<bool>& flag) {
    for (int i = 0; i < 20'000 && !flag.load(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return flag.load() ? "" : "waited in vain";
  };
  for (const bool is_stopped : {false, true}) {
    ExchangeSetup setup = setup_of(3, "shm");
    setup.timeout = std::chrono::seconds(is_stopped ? 3 : 60);
    const SurvivorRounds rounds(setup, {});
    const Shared<Board> board;
    const auto live_on = [&](Exchange& exchange) {
      std::string problem = rounds.run(exchange, 10);
      if (exchange.rank() == 0) {
        board->is_back.store(true);
        ::kill(board->old.load(), SIGCONT);
      }
      problem += await(board->is_gone);
      problem += rounds.run(exchange, 11);
      problem += rounds.run(exchange, 12);
      const CallReport report = exchange.report();
      return text(report.alive) == "0,1,2" ? problem : problem + "; alive " + text(report.alive);
    };
    const pid_t spare = ::fork();
    if (spare == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      static_cast<void>(await(board->is_there));
      const Group group = Group::rejoin(1, board->invitation.data());
      Exchange exchange = shrinking(group, setup);
      std::string problem;
      const auto thrown = thrown_by([&] { problem = live_on(exchange); });
      ::_exit(verdict(thrown ? text_of(thrown) : problem));
    }
    const auto statuses = run_forked(3, [&](const Group& group) {
      std::optional<Exchange> exchange(shrinking(group, setup));
      std::string problem = rounds.run(*exchange, 1);
      if (group.rank() == 1) {
        board->old.store(::getpid());
      }
      group.barrier();
      if (group.rank() == 0 && !is_stopped) {
        exchange->mask(std::vector<int>{1});
      }
      const auto thrown = thrown_by([&] {
        problem += rounds.run(*exchange, 2, [&](int call) {
          if (group.rank() == 1 && call == 1) {
            std::raise(SIGSTOP);
          }
        });
      });
      if (group.rank() == 1) {
        problem += await(board->is_back);
        exchange.reset();
        board->is_gone.store(true);
        return verdict(thrown && thrown->is_peer_error ? problem : text_of(thrown));
      }
      if (group.rank() == 0) {
        exchange->invitation().copy(board->invitation.data(), 2047);
        board->is_there.store(true);
      }
      exchange->readmit(std::vector<int>{1});
      return verdict(problem + live_on(*exchange));
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0, 0})) << "stopped: " << is_stopped;
    int status = 0;
    ::waitpid(spare, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "stopped: " << is_stopped;
  }
}

TEST_F(ReadmissionTest, SaysWhyARankCannotComeBack) {
  const ExchangeSetup setup = setup_of(2, "shm");
  std::atomic<bool> has_given_up = false;
  run_threads(2, [&](const Group& group) {
    ExchangeConfig config = setup.config();
    config.on_peer_loss = PeerLoss::kShrink;
    config.timeout = std::chrono::milliseconds(200);
    std::optional<Exchange> exchange(std::in_place, group, config);
    const std::string invitation = exchange->invitation();
    const std::vector<int> other = {1 - group.rank()};
    EXPECT_EQ(thrown_by([&] { exchange->readmit(other); })->code, ErrorCode::kInvalidArgument);
    group.barrier();
    if (group.rank() == 1) {
      exchange.reset();
      const Group again = Group::rejoin(1, invitation);
      const auto thrown = thrown_by([&] { Exchange(again, config); });
      has_given_up = true;
      EXPECT_TRUE(thrown->is_timeout);
      EXPECT_NE(text_of(thrown).find("have not called readmit within 0.2 s"), std::string::npos);
    } else {
      const Matrix idx(DType::kInt32, 0, 4);
      static_cast<void>(exchange->plan({.topk_idx = idx.view()}));
      EXPECT_EQ(text(exchange->report().alive), "0");
      while (!has_given_up) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto thrown = thrown_by([&] { exchange->readmit(other); });
      EXPECT_EQ(text_of(thrown).substr(0, 40), "readmit: rank 1 did not come within 0.2 ");
      static_cast<void>(exchange->plan({.topk_idx = idx.view()}));
    }
  });
  EXPECT_EQ(
      thrown_by([&] { static_cast<void>(Group::rejoin(1, "weft-12")); })->code,
      ErrorCode::kInvalidArgument
  );
}

// Dies as a member that has not met the others yet; the next one comes in its place.
TEST_F(ReadmissionTest, ARankMayBeLostAgainWhileItComesBack) {
  const ExchangeSetup setup = setup_of(4, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<std::array<Letter, 2>> letters;
  const Spare first([&] {
    take_place(1, letters->at(0).await());
    return std::raise(SIGKILL);
  });
  const Spare second([&] {
    const Group group = Group::rejoin(1, letters->at(1).await());
    Exchange exchange = shrinking(group, setup);
    return verdict(rounds.run(exchange, 3));
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    std::vector<int> heard;
    Exchange exchange =
        shrinking(group, setup, [&](const CallReport& report) { heard = report.lost; });
    std::string problem = rounds.run(exchange, 1, [&](int call) {
      if (group.rank() == 1 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    if (group.rank() == 2) {
      letters->at(0).send(exchange);
    }
    heard.clear();
    const auto thrown = thrown_by([&] { exchange.readmit(std::vector<int>{1}); });
    if (text_of(thrown).find("readmit: rank 1 was lost again") == std::string::npos ||
        text(exchange.report().alive) != "0,2,3" || !heard.empty()) {
      problem += fmt::format("{}; alive {}", text_of(thrown), text(exchange.report().alive));
    }
    problem += rounds.run(exchange, 2);
    if (group.rank() == 2) {
      letters->at(1).send(exchange);
    }
    exchange.readmit(std::vector<int>{1});
    problem += rounds.run(exchange, 3);
    return verdict(text(exchange.report().alive) == "0,1,2,3" ? problem : problem + "; not back");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0, 0}));
  EXPECT_EQ(first.status(), 128 + SIGKILL);
  EXPECT_EQ(second.status(), 0);
}

// A rank that is left is lost before it meets those that come back: on all others the readmission
// is over without it.
TEST_F(ReadmissionTest, ARankMayBeLostWhileAnotherComesBack) {
  const ExchangeSetup setup = setup_of(4, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<Letter> letter;
  const Spare spare([&] {
    const Group group = Group::rejoin(1, letter->await());
    Exchange exchange = shrinking(group, setup);
    return verdict(rounds.run(exchange, 2));
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    std::vector<int> heard;
    Exchange exchange =
        shrinking(group, setup, [&](const CallReport& report) { heard = report.lost; });
    std::string problem = rounds.run(exchange, 1, [&](int call) {
      if (group.rank() == 1 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    if (group.rank() == 0) {
      letter->send(exchange);
    }
    if (group.rank() == 3) {
      std::raise(SIGKILL);
    }
    exchange.readmit(std::vector<int>{1});
    const CallReport report = exchange.report();
    if (text(report.alive) != "0,1,2" || text(report.lost) != "3" || text(heard) != "3") {
      problem += fmt::format("alive {}, lost {}", text(report.alive), text(report.lost));
    }
    return verdict(problem + rounds.run(exchange, 2));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0, 128 + SIGKILL}));
  EXPECT_EQ(spare.status(), 0);
}

// A rank that has waited for another in vain does not go on alone.
TEST_F(ReadmissionTest, EndsOnAllWhenTheTimeOfOneIsUp) {
  const ExchangeSetup setup = setup_of(3, "shm");
  const SurvivorRounds rounds(setup, {});
  const auto statuses = run_forked(3, [&](const Group& group) {
    ExchangeSetup own = setup;
    own.timeout = std::chrono::seconds(group.rank() == 0 ? 2 : 600);
    Exchange exchange = shrinking(group, own);
    std::string problem = rounds.run(exchange, 1, [&](int call) {
      if (group.rank() == 1 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    const auto thrown = thrown_by([&] { exchange.readmit(std::vector<int>{1}); });
    if (!thrown || !thrown->is_timeout || text(exchange.report().alive) != "0,2") {
      problem += fmt::format("{}; alive {}", text_of(thrown), text(exchange.report().alive));
    }
    return verdict(problem + rounds.run(exchange, 2));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

// A rank that was masked is not yet seen to be lost when another is taken in.
TEST_F(ReadmissionTest, AMaskedRankIsLostWhileAnotherComesBack) {
  const ExchangeSetup setup = setup_of(4, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<Letter> letter;
  const Spare spare([&] {
    const Group group = Group::rejoin(1, letter->await());
    Exchange exchange = shrinking(group, setup);
    return verdict(rounds.run(exchange, 2));
  });
  const auto statuses = run_forked(4, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem;
    const auto thrown = thrown_by([&] {  // rank 3 may hear of the mask while it leaves its round
      problem = rounds.run(exchange, 1, [&](int call) {
        if (group.rank() == 1 && call == 1) {
          std::raise(SIGKILL);
        }
      });
      if (group.rank() == 0) {
        exchange.mask(std::vector<int>{3});
        letter->send(exchange);
      }
      exchange.readmit(std::vector<int>{1});
    });
    if (group.rank() == 3) {
      return verdict(thrown && thrown->is_peer_error ? "" : text_of(thrown));
    }
    if (thrown || text(exchange.report().alive) != "0,1,2") {
      problem += fmt::format("{}; alive {}", text_of(thrown), text(exchange.report().alive));
    }
    return verdict(problem + rounds.run(exchange, 2));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0, 0}));
  EXPECT_EQ(spare.status(), 0);
}

TEST_F(ReadmissionTest, AnotherConfigIsRefusedAndHurtsNobody) {
  const ExchangeSetup setup = setup_of(3, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<Letter> letter;
  const Spare spare([&] {
    ExchangeSetup other = setup;
    other.hidden *= 2;
    const Group group = Group::rejoin(1, letter->await());
    const auto thrown = thrown_by([&] { shrinking(group, other); });
    return verdict(thrown && thrown->code == ErrorCode::kInvalidArgument ? "" : text_of(thrown));
  });
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 1, [&](int call) {
      if (group.rank() == 1 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    if (group.rank() == 0) {
      letter->send(exchange);
    }
    const auto thrown = thrown_by([&] { exchange.readmit(std::vector<int>{1}); });
    if (text_of(thrown).find("readmit: rank 1 was lost again") == std::string::npos) {
      problem += text_of(thrown);
    }
    return verdict(problem + rounds.run(exchange, 2));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  EXPECT_EQ(spare.status(), 0);
}

// All who could tell how many calls there were are lost before they have.
TEST_F(ReadmissionTest, ThoseWhoComeBackGoOnWhenAllOthersAreLost) {
  const ExchangeSetup setup = setup_of(3, "shm");
  const SurvivorRounds rounds(setup, {});
  const Shared<Letter> letter;
  const auto come_back = [&](int rank) {
    const Group group = Group::rejoin(rank, letter->await());
    Exchange exchange = shrinking(group, setup);
    std::string problem = rounds.run(exchange, 2);
    problem += rounds.run(exchange, 3);
    return verdict(text(exchange.report().alive) == "1,2" ? problem : problem + "; not alone");
  };
  const Spare first([&] { return come_back(1); });
  const Spare second([&] { return come_back(2); });
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange = shrinking(group, setup);
    const std::string problem = rounds.run(exchange, 1, [&](int call) {
      if (group.rank() != 0 && call == 1) {
        std::raise(SIGKILL);
      }
    });
    if (!problem.empty()) {
      return verdict(problem);
    }
    // Rank 0 does its part of a readmission, but dies before it tells how many calls there were.
    letter->send(exchange);
    SharedRoll roll(make_shm_memory(), Group::rejoin(0, exchange.invitation()));
    const Roll::Members members = roll.members();
    roll.follow(members);
    while (!roll.asks(1) || !roll.asks(2)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    roll.propose(members, roll.committed() + 1, std::vector<int>{0, 1, 2});
    return std::raise(SIGKILL);
  });
  EXPECT_EQ(statuses, std::vector<int>(3, 128 + SIGKILL));
  EXPECT_EQ(first.status(), 0);
  EXPECT_EQ(second.status(), 0);
}

// Lives that are two apart share a line of the roll. Rank 1 was stopped in the middle of a call,
// for all that others know.
TEST_F(ReadmissionTest, WhoGoesOnLateSaysNothingForTheNextButOne) {
  struct Board {
    std::array<Letter, 2> letters;
    std::atomic<bool> is_asking = false;
    std::atomic<bool> is_gone = false;
  };
  const auto await = [](const std::atomic<bool>& flag) {
    while (!flag.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  ExchangeSetup setup = setup_of(2, "shm");
  setup.timeout = std::chrono::seconds(5);
  const SurvivorRounds rounds(setup, {});
  const Shared<Board> board;
  const Spare first([&] {
    take_place(1, board->letters[0].await());
    return std::raise(SIGKILL);
  });
  const Spare second([&] {
    ::alarm(60);
    SharedRoll roll(make_shm_memory(), Group::rejoin(1, board->letters[1].await()));
    roll.be_next(roll.members());
    roll.ask(true);
    Roll::Members members = roll.members();
    ++members.lives[1];  // as the others will have them, so that what is read is its own line
    roll.follow(members);
    const std::array<std::byte, 3> said = {std::byte{1}, std::byte{2}, std::byte{3}};
    roll.arrive(members, 77);
    roll.post(9, 1, said);
    board->is_asking.store(true);
    await(board->is_gone);
    const auto mail = roll.mail(1, 9, 1);
    if (!roll.has_arrived(1, members, 77) || !mail || !std::ranges::equal(*mail, said)) {
      return 2;
    }
    for (int i = 0; i < 10'000 && !roll.is_in(roll.members()); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return roll.is_in(roll.members()) ? 0 : 1;
  });
  const auto statuses = run_forked(2, [&](const Group& group) {
    std::optional<Exchange> exchange(shrinking(group, setup));
    std::string problem = rounds.run(*exchange, 1);
    group.barrier();
    if (group.rank() == 1) {
      SharedRoll late(make_shm_memory(), Group::rejoin(1, exchange->invitation()));
      await(board->is_asking);
      late.arrive(late.members(), 5);
      late.post(3, 1, std::array{std::byte{4}});
      exchange.reset();
      board->is_gone.store(true);
      return verdict(problem);
    }
    exchange->mask(std::vector<int>{1});
    problem += rounds.run(*exchange, 2);
    for (Letter& letter : board->letters) {
      letter.send(*exchange);
      if (&letter == &board->letters[1]) {
        await(board->is_gone);
      }
      const auto thrown = thrown_by([&] { exchange->readmit(std::vector<int>{1}); });
      if (text_of(thrown).find("was lost again") == std::string::npos) {
        problem += text_of(thrown);
      }
    }
    return verdict(problem + rounds.run(*exchange, 3));
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
  EXPECT_EQ(first.status(), 128 + SIGKILL);
  EXPECT_EQ(second.status(), 0);
}

}  // namespace
}  // namespace weft::test
