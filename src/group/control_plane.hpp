// SPDX-License-Identifier: Apache-2.0
// How ranks swap small blocks during set-up: by an AllGather, which is the caller's own function,
// or one among threads (group.cpp) or over TCP (tcp/rendezvous.hpp).
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/check.hpp"
#include "weft/group.hpp"

namespace weft {

// Collective: measures the topology. One caller per rank at a time; the function throws
// TimeoutError naming the ranks that did not call, PeerError for a rank that closed its side.
[[nodiscard]] Group make_group(int rank, int num_ranks, AllGather all_gather);

// The ranks `members` (ascending, the caller's among them) as a group of one domain, numbered from
// 0. It speaks through `group`, so every rank of that makes a part of its own at the same time, and
// all make the same calls on it.
[[nodiscard]] Group part_of(const Group& group, const std::vector<int>& members);

// Ranks that are threads of one process meet at a shared table. One function per rank; a rank that
// has dropped the last copy of its own has left.
[[nodiscard]] std::vector<AllGather> make_local_control(
    int num_ranks, std::chrono::milliseconds timeout
);

// Throws Error (kInvalidArgument) for a group without ranks and for a rank out of range.
inline void check_place(std::string_view verb, int rank, int num_ranks) {
  WEFT_CHECK_ARG(
      Context{}, num_ranks >= 1, "{}: num_ranks = {} is too small (at least 1)", verb, num_ranks
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

// What a rank said in an all_gather, as a value: the T at the beginning of its block. Throws Error
// (kPeerFailed) where there is less: ranks made different calls, or an application's own all_gather
// lost something.
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

// Collective: everybody's value, by rank. Throws what block_value() throws.
template <class T>
[[nodiscard]] std::vector<T> gather_values(const Group& group, const T& own) {
  std::vector<T> values;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&own, 1)))) {
    const Context context = {.rank = group.rank(), .num_ranks = group.num_ranks()};
    values.push_back(block_value<T>(block, values.size(), context));
  }
  return values;
}

// Ranks in messages: "rank 3", "ranks 1, 4 and 5".
[[nodiscard]] inline std::string rank_list(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    const bool is_last = i + 1 == ranks.size();
    text += i == 0 ? "" : is_last ? " and " : ", ";
    text += fmt::format("{}", ranks[i]);
  }
  return text;
}

// The version of all that ranks say to each other: rendezvous, cards, handshakes of calls, records,
// messages of transports. Raise it with every change to any of these, so that ranks of different
// builds part with an error that says so.
inline constexpr uint32_t kProtocolVersion = 3;

}  // namespace weft
