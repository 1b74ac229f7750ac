// SPDX-License-Identifier: Apache-2.0
// How ranks swap small blocks during set-up: by an AllGather, which is the caller's own function,
// or one among threads (group.cpp) or over TCP (tcp/rendezvous.hpp).
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <sys/random.h>
#include <type_traits>
#include <unistd.h>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "weft/group.hpp"

namespace weft {

// Collective: measures the topology. One caller per rank at a time; `all_gather` throws
// TimeoutError naming the ranks that did not call, PeerError for a rank that closed its side.
[[nodiscard]] Group make_group(int rank, int num_ranks, AllGather all_gather);

// Returns `members` (ascending, the caller's rank among them) as a group of one domain, numbered
// from 0. The part speaks through `group`, so every rank of `group` makes a part at the same time,
// and all make the same calls on it.
[[nodiscard]] Group part_of(const Group& group, const std::vector<int>& members);

// Returns the same ranks in the same places, who speak by `all_gather`.
[[nodiscard]] Group with_control(const Group& group, AllGather all_gather);

// Returns one function per rank, for ranks that are threads of one process and share a table. A
// rank that has dropped the last copy of its function has left.
[[nodiscard]] std::vector<AllGather> make_local_control(
    int num_ranks, std::chrono::milliseconds timeout
);

// Most ranks of a group. More were never even simulated, and set-up tells each rank of all others.
inline constexpr int kMaxRanks = 16384;

// run_forked() with another patience than the usual one, for tests.
struct ForkLimits {
  // After a rank failed, the others have this long to notice by themselves; then they are
  // terminated, and a little later killed.
  std::chrono::milliseconds notice = std::chrono::seconds(5);
  std::chrono::milliseconds terminate = std::chrono::seconds(2);
};

[[nodiscard]] std::vector<int> run_forked(
    int num_ranks, const std::function<int(Group&)>& body, const ForkLimits& limits
);

// Throws Error (kInvalidArgument) for a group without ranks and for a rank out of range.
inline void check_place(std::string_view verb, int rank, int num_ranks) {
  WEFT_CHECK_ARG(
      Context{}, num_ranks >= 1, "{}: num_ranks = {} is too small (at least 1)", verb, num_ranks
  );
  WEFT_CHECK_ARG(
      Context{},
      num_ranks <= kMaxRanks,
      "{}: num_ranks = {} is too large (at most {})",
      verb,
      num_ranks,
      kMaxRanks
  );
  WEFT_CHECK_ARG(
      Context{},
      rank >= 0 && rank < num_ranks,
      "{}: rank {} is out of range (num_ranks = {})",
      verb,
      rank,
      num_ranks
  );
}

[[nodiscard]] inline Context context_of(const Group& group, std::string_view transport = {}) {
  return {.rank = group.rank(), .num_ranks = group.num_ranks(), .transport = transport};
}

// Returns the bytes of a trivially copyable value, as they travel.
template <class T>
[[nodiscard]] std::span<const std::byte> value_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

// Returns what a rank said in an all_gather, as a value: the T at the beginning of its block.
// Throws Error (kPeerFailed) where there is less: ranks made different calls, or an application's
// own all_gather lost something.
template <class T>
T block_value(const Bytes& block, size_t rank, const Context& context) {
  static_assert(std::is_trivially_copyable_v<T>);
  WEFT_CHECK(
      context,
      block.size() >= sizeof(T),
      ErrorCode::kPeerFailed,
      "all_gather: rank {} sent {} B where {} B are expected (are all ranks in the same call, with "
      "the same options?)",
      rank,
      block.size(),
      sizeof(T)
  );
  T value;
  std::memcpy(&value, block.data(), sizeof value);
  return value;
}

// Collective: returns every rank's value, by rank. Throws what block_value() throws.
template <class T>
[[nodiscard]] std::vector<T> gather_values(const Group& group, const T& own) {
  std::vector<T> values;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&own, 1)))) {
    const Context context = {.rank = group.rank(), .num_ranks = group.num_ranks()};
    values.push_back(block_value<T>(block, values.size(), context));
  }
  return values;
}

// Returns random bytes, fit for keys. Throws Error (kNotAvailable) if the system has none.
template <class T>
[[nodiscard]] T random_value() {
  T value;
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, ::getrandom(&value, sizeof value, 0));
  return value;
}

// Names ranks, one at least: "rank 3", "ranks 1, 4 and 5"; of many, some and how many more.
[[nodiscard]] inline std::string rank_list(std::span<const int> ranks) {
  constexpr size_t kMostNamed = 16;
  WEFT_ASSERT(!ranks.empty());
  if (ranks.size() == 1) {
    return fmt::format("rank {}", ranks.front());
  }
  const size_t num_named = std::min(ranks.size() - 1, kMostNamed);
  const bool are_all = num_named == ranks.size() - 1;
  return fmt::format(
      "ranks {} and {}{}",
      fmt::join(ranks.first(num_named), ", "),
      are_all ? ranks.back() : static_cast<int>(ranks.size() - num_named),
      are_all ? "" : " more"
  );
}

// Why a group ended, in words that fit every rank.
struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  std::string text;

  [[noreturn]] void raise(const Context& context) const { raise_error(code, context, text); }
};
[[nodiscard]] inline Failure late_failure(
    std::span<const int> ranks, std::chrono::milliseconds timeout
) {
  return {
      ErrorCode::kTimeout,
      fmt::format(
          "all_gather: {} did not call within {}", rank_list(ranks), seconds_text(timeout)
      )};
}

// Throws Error (kUnsupported) in a child that fork() made of process `maker`. The threads,
// connections and shared memory that the child inherits are its parent's: the child must neither
// use nor end them.
inline void check_maker(std::string_view verb, pid_t maker, const Context& context) {
  WEFT_CHECK(
      context,
      ::getpid() == maker,
      ErrorCode::kUnsupported,
      "{}: process {} was forked from process {}, which is this rank, and has to make a group and "
      "exchange of its own",
      verb,
      ::getpid(),
      maker
  );
}

// The version of all that ranks say to each other: rendezvous, cards, handshakes of calls, records,
// messages of transports. Raise it with every change to any of these, so that ranks of different
// builds part with an error that says so.
inline constexpr uint32_t kProtocolVersion = 8;

}  // namespace weft
