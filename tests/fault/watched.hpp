// SPDX-License-Identifier: Apache-2.0
// A rank that watches for lost ranks as one on a GPU does, without a GPU: its calls are made up,
// and a count stands for the kernels that are stopped.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/exchange/loss_watch.hpp"

namespace weft::test {

inline constexpr std::chrono::milliseconds kTimeout = std::chrono::seconds(20);
inline constexpr std::chrono::milliseconds kSoon = std::chrono::seconds(10);  // on a busy machine

// Tests by how ranks hear of each other, see Watched.
class LossWatchTest : public testing::TestWithParam<const char*> {};

// A rank whose calls are made up.
class Watched {
 public:
  // `transport` "peer": by memory that they share, another: by messages. `connect`: see
  // LossWatch::Kernels.
  explicit Watched(
      const Group& group,
      std::string_view transport = "peer",
      std::chrono::milliseconds timeout = kTimeout,
      const LossWatch::Connect& connect = {}
  )
      : context_{.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = transport},
        watch_(std::make_unique<LossWatch>(
            group,
            context_,
            timeout,
            LossWatch::Kernels{
                .stop = [this] { ++num_stops_; },
                .calls = [this] { return ended_calls(); },
                .connect = connect}
        )) {}

  [[nodiscard]] LossWatch& watch() { return *watch_; }
  [[nodiscard]] int num_stops() const { return num_stops_; }
  void leave() { watch_.reset(); }

  // Rank r has ended call 10 + r, and its calls from 8 + r on are void.
  [[nodiscard]] std::optional<LossWatch::Agreement> settle(
      ErrorCode cause = ErrorCode::kPeerFailed, std::optional<int> late = std::nullopt
  ) {
    const auto agreed =
        watch_->settle("plan", cause, calls_of(static_cast<uint64_t>(context_.rank)), late);
    watch_->resume();
    return watch_->has_news() ? std::nullopt : agreed;
  }

  // Returns what is wrong, or nothing, after `lost` (a mask) when all `alive` have called settle().
  [[nodiscard]] std::string problem(
      const std::optional<LossWatch::Agreement>& agreed,
      const std::vector<int>& alive,
      uint32_t lost
  ) const {
    const auto first = static_cast<uint64_t>(alive.front());
    const auto last = static_cast<uint64_t>(alive.back());
    const CallReport report = watch_->report();
    const auto rank = static_cast<uint64_t>(context_.rank);
    const bool is_good = agreed && agreed->last == 10 + last &&
                         agreed->void_calls == static_cast<int64_t>(3 + rank - first) &&
                         agreed->calls_behind == static_cast<int64_t>(last - rank) &&
                         report.alive == alive && watch_->lost() == lost;
    return is_good ? std::string()
                   : fmt::format(
                         "last {}, void {}, behind {}, alive {}, lost {:b}; ",
                         agreed ? agreed->last : 0,
                         agreed ? agreed->void_calls : 0,
                         agreed ? agreed->calls_behind : 0,
                         fmt::join(report.alive, ","),
                         watch_->lost()
                     );
  }

 private:
  // The kernels have not ended yet when they are asked for the first time.
  [[nodiscard]] std::optional<LossWatch::Calls> ended_calls() {
    return num_asked_++ == 0 ? std::nullopt
                             : std::optional(calls_of(static_cast<uint64_t>(context_.rank)));
  }
  [[nodiscard]] static LossWatch::Calls calls_of(uint64_t rank) {
    return {.last = 10 + rank, .first_void = 8 + rank};
  }

  Context context_;
  std::atomic<int> num_stops_ = 0;
  std::atomic<int> num_asked_ = 0;
  std::unique_ptr<LossWatch> watch_;
};

inline int verdict(int rank, const std::string& problem) {
  if (!problem.empty()) {
    fmt::print(stderr, "rank {}: {}\n", rank, problem);
  }
  return problem.empty() ? 0 : 1;
}

inline constexpr int kKilled = 128 + SIGKILL;

}  // namespace weft::test
