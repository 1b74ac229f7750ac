// SPDX-License-Identifier: Apache-2.0
// Exchange::readmit again and again, at random moments, and what is left of that.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <iterator>
#include <optional>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "fault/survival_cases.hpp"
#include "group/control_plane.hpp"
#include "plan/random_routing.hpp"
#include "support/errors.hpp"
#include "support/process_memory.hpp"
#include "survivors/shared.hpp"
#include "survivors/spare.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

// Two ranks in the middle of four are lost and come back many times, every other time with a
// process that dies at a random moment of its return. Survivors hold no more memory afterwards.
class Returns {
 public:
  static constexpr int kNumReturns = 16;
  static constexpr std::array<int, 2> kMortal = {1, 2};

  // Sees to it, in a process of its own, that a new process comes in the place of a rank.
  int supervise(int number, int rank) {
    const char* const invitation = letter(number).await();
    for (int attempt = 0; !is_whole(number); ++attempt) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (number % 2 == 0 && attempt == 0) {
          std::thread([after = RandomSource(static_cast<uint64_t>(2 * number + rank)).below(6000)] {
            std::this_thread::sleep_for(std::chrono::microseconds(after));
            std::raise(SIGKILL);
          }).detach();
        }
        Exchange exchange = shrinking(Group::rejoin(rank, invitation), setup_);
        ::_exit(verdict(live(exchange, number)));
      }
      // A process that comes too late must not be there at the next return.
      while (::waitpid(child, nullptr, WNOHANG) == 0) {
        if (is_whole(number) && !board_->is_in[at(number)][at(rank)].load()) {
          ::kill(child, SIGKILL);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    ++board_->num_settled[at(number)];
    return 0;
  }

  // Runs rank 0 or 3 through all returns. Returns what went wrong, or nothing.
  std::string stay(Exchange& exchange) {
    std::string problem = live(exchange, 0);
    std::optional<ProcessMemory> before;
    for (int number = 1; number < kNumReturns && problem.empty(); ++number) {
      if (exchange.rank() == 0) {
        letter(number).send(exchange);
      }
      problem = live(exchange, number);
      const ProcessMemory now = measure_process_memory();
      if (before && (now.num_shared_mappings > before->num_shared_mappings ||
                     now.num_descriptors > before->num_descriptors)) {
        problem += fmt::format(
            "return {}: {} shared mappings, {} descriptors ({}, {} before)",
            number,
            now.num_shared_mappings,
            now.num_descriptors,
            before->num_shared_mappings,
            before->num_descriptors
        );
      }
      before = before.value_or(now);
      while (board_->num_settled[at(number)].load() < 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    return problem;
  }

  [[nodiscard]] const ExchangeSetup& setup() const { return setup_; }

 private:
  struct Board {
    std::array<Letter, kNumReturns> letters;
    std::array<std::atomic<bool>, kNumReturns> is_whole = {};
    std::array<std::array<std::atomic<bool>, 4>, kNumReturns> is_in = {};
    std::array<std::atomic<int>, kNumReturns> num_settled = {};
  };
  static size_t at(int index) { return static_cast<size_t>(index); }
  Letter& letter(int number) { return board_->letters[at(number)]; }
  bool is_whole(int number) { return board_->is_whole[at(number)].load(); }

  // Between two returns: all come together, then the mortal ones die in a call.
  std::string live(Exchange& exchange, int number) {
    for (;;) {
      const std::vector<int> alive = exchange.report().alive;
      std::vector<int> lost;
      std::ranges::copy_if(kMortal, std::back_inserter(lost), [&](int rank) {
        return std::ranges::find(alive, rank) == alive.end();
      });
      if (lost.empty()) {
        break;
      }
      const auto thrown = thrown_by([&] { exchange.readmit(lost); });
      if (thrown && text_of(thrown).find("was lost again") == std::string::npos) {
        return text_of(thrown);
      }
    }
    board_->is_in[at(number)][at(exchange.rank())].store(true);
    board_->is_whole[at(number)].store(true);
    const SurvivorRounds rounds(setup_, {});
    const auto seed = static_cast<uint64_t>(10 * number);
    std::string problem = rounds.run(exchange, seed);
    problem += rounds.run(exchange, seed + 1, [&](int call) {
      if (call == number % 3 && exchange.rank() % 3 != 0) {
        std::raise(SIGKILL);
      }
    });
    problem += rounds.run(exchange, seed + 2);
    const std::string left = text(exchange.report().alive);
    return left == "0,3" ? problem : problem + "; alive " + left;
  }

  const ExchangeSetup setup_ = setup_of(4, "shm");
  const Shared<Board> board_;
};

TEST(ReturnTest, RanksAreLostAndComeBackManyTimes) {
  Returns returns;
  std::vector<Spare> supervisors;
  for (int number = 1; number < Returns::kNumReturns; ++number) {
    for (const int rank : Returns::kMortal) {
      supervisors.emplace_back([&returns, number, rank] { return returns.supervise(number, rank); }
      );
    }
  }
  const auto body = [&](const Group& group) {
    Exchange exchange = shrinking(group, returns.setup());
    return verdict(returns.stay(exchange));
  };
  // Nearly all of it comes after the first deaths.
  const auto statuses = run_forked(4, body, {.notice = std::chrono::seconds(90)});
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 128 + SIGKILL, 0}));
  for (const Spare& supervisor : supervisors) {
    EXPECT_EQ(supervisor.status(), 0);
  }
}

}  // namespace
}  // namespace weft::test
