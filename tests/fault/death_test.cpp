// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, one of which is killed or stopped at some step. The others must say so by an
// error that names it, in bounded time, and leave nothing behind.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "support/errors.hpp"
#include "support/killed_rank.hpp"
#include "support/process_memory.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

constexpr auto kHangGuard = std::chrono::seconds(5);  // notice takes a fraction of a second

// Point of a rank's life at which it ends.
enum class Step { kBeforePlan, kBeforeDispatch, kBeforeCombine, kAfterAll };

class DeathTest : public testing::Test {
 protected:
  DeathTest() {
    setup_.num_ranks = 3;
    setup_.num_experts = 6;
    setup_.transport = "shm";
    setup_.num_threads = 2;
    Case spec;
    spec.num_tokens = {20, 32, 7};
    data_ = make_case_data(setup_, spec);
    void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    num_done_ = new (shared) std::atomic<int>(0);
  }
  ~DeathTest() override { ::munmap(num_done_, 4096); }

  // plan, dispatch, combine, plan; `signal` strikes this process before the step.
  void make_calls(Exchange& exchange, Step step, int signal) {
    const auto rank = static_cast<size_t>(exchange.rank());
    const auto strike_at = [&](Step now) {
      if (rank == 1 && step == now) {
        std::raise(signal);
      }
    };
    const RankRouting& routing = data_.routing[rank];
    RankCall forward = data_.calls[0][rank];
    RankCall backward = data_.calls[1][rank];
    strike_at(Step::kBeforePlan);
    const Plan plan = exchange.plan(routing.routing(), routing.options);
    strike_at(Step::kBeforeDispatch);
    exchange.dispatch(plan, forward.dispatch_input(), forward.dispatch_output());
    strike_at(Step::kBeforeCombine);
    exchange.combine(plan, backward.combine_input(CombineScale::kNone), backward.combine_output());
    strike_at(Step::kAfterAll);
    static_cast<void>(exchange.plan(routing.routing(), routing.options));
  }

  ExchangeSetup setup_;
  CaseData data_;
  std::atomic<int>* num_done_;  // shared by all processes: ranks that have seen the error
};

// 0 if all is as it should be; else prints what is not.
int verdict(bool is_good, const std::string& text) {
  if (!is_good) {
    std::cerr << text << std::endl;
  }
  return is_good ? 0 : 1;
}

// Returns whether this process maps no shared memory, as a survivor must once its exchange is gone.
bool has_no_shared_memory() {
  return measure_process_memory().num_shared_mappings == 0;
}

std::vector<std::string> names_in_dev_shm() {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", none)) {
    const std::string name = entry.path().filename().string();
    if (name.find("weft") != std::string::npos) {
      names.push_back(name);
    }
  }
  return names;
}

TEST_F(DeathTest, AKilledRankIsNamedAtEveryStep) {
  const std::vector<std::string> before = names_in_dev_shm();
  const std::array<const char*, 4> operations = {"plan", "dispatch", "combine", "plan"};
  for (int step = 0; step < 4; ++step) {
    const auto statuses = run_forked(3, [&](const Group& group) {
      std::optional<Exchange> exchange(std::in_place, group, setup_.config());
      const auto start = std::chrono::steady_clock::now();
      const auto thrown =
          thrown_by([&] { make_calls(*exchange, static_cast<Step>(step), SIGKILL); });
      const auto time = std::chrono::steady_clock::now() - start;
      const std::string text = text_of(thrown);
      const std::string begin = fmt::format(
          "{}: rank 1 died before its handshake arrived (call {}, ",
          operations[static_cast<size_t>(step)],
          step + 1
      );
      const auto again = thrown_by([&] { make_calls(*exchange, Step::kAfterAll, SIGKILL); });
      exchange.reset();
      return verdict(
          thrown && thrown->is_peer_error && text.starts_with(begin) && time < kHangGuard &&
              text_of(again) == text && has_no_shared_memory(),
          text + "\nagain: " + text_of(again)
      );
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0})) << "step " << step;
  }
  EXPECT_EQ(names_in_dev_shm(), before);
}

TEST_F(DeathTest, ARankKilledAnywhereEndsTheOthersInTime) {
  for (int delay_us = 200; delay_us < 20'000; delay_us *= 3) {
    const auto statuses = run_until_killed(data_, 1, std::chrono::microseconds(delay_us));
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0})) << "after " << delay_us << " us";
  }
}

TEST_F(DeathTest, AStoppedRankIsNamedWhenTimeIsUp) {
  setup_.timeout = std::chrono::milliseconds(400);
  const std::array<const char*, 4> operations = {"plan", "dispatch", "combine", "plan"};
  for (int step = 0; step < 4; ++step) {
    num_done_->store(0);
    const auto statuses = run_forked(3, [&](const Group& group) {
      Exchange exchange(group, setup_.config());
      const pid_t own = ::getpid();
      const auto pids = group.all_gather(std::as_bytes(std::span(&own, 1)));
      const auto thrown =
          thrown_by([&] { make_calls(exchange, static_cast<Step>(step), SIGSTOP); });
      // The stopped rank ends when both others have had their error.
      ++*num_done_;
      const auto guard = std::chrono::steady_clock::now() + 4 * kHangGuard;
      while (*num_done_ < 2 && std::chrono::steady_clock::now() < guard) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      pid_t stopped = 0;
      std::memcpy(&stopped, pids[1].data(), sizeof stopped);
      if (group.rank() == 0) {
        ::kill(stopped, SIGKILL);
      }
      const std::string begin = fmt::format(
          "{}: no handshake for 0.4 s from rank 1 (signal {} at {} of {}) (call {}). Is the peer ",
          operations[static_cast<size_t>(step)],
          step % 2 == 0 ? 4 : 1,
          step / 2,
          step / 2 + 1,
          step + 1
      );
      return verdict(
          thrown && thrown->is_timeout && thrown->text.starts_with(begin), text_of(thrown)
      );
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0})) << "step " << step;
  }
}

TEST_F(DeathTest, AFreshGroupWorksAfterOneHasDied) {
  const auto statuses = run_forked(3, [&](const Group& group) {
    Exchange exchange(group, setup_.config());
    const auto thrown = thrown_by([&] { make_calls(exchange, Step::kBeforeDispatch, SIGKILL); });
    // The survivor goes on with a group of its own, in the same process.
    ExchangeSetup alone = setup_;
    alone.num_ranks = 1;
    Case spec;
    spec.num_tokens = {25};
    const std::string failure = run_on_threads(alone, spec);
    return verdict(thrown.has_value() && failure.empty(), failure);
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  EXPECT_EQ(run_cases_on_processes({&data_, 1}), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(run_cases_on_threads({&data_, 1}), "");
}

}  // namespace
}  // namespace weft::test
