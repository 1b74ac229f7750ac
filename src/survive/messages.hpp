// SPDX-License-Identifier: Apache-2.0
// Messages by which ranks agree: payloads of frames (group/tcp/frame.hpp).
//
//   kBeat, kLeft, kAsk   nothing
//   kArrived             Number, of a call
//   kMail                Number, of a round, and the block
//   kVote                Number, of the last call that is over, and a Wish for each rank
//   kAgreed              the same, 2 * life + (1 if it is a member) of each rank, and where all
//                        ranks can be reached; also the answer to a new process
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "survive/ballots.hpp"
#include "survive/links.hpp"
#include "survive/roll.hpp"

namespace weft {

// Trivially copyable.
struct Number {
  uint64_t epoch = 0;
  uint64_t of = 0;
  uint64_t set = 0;  // of the members of that epoch, see number_of()
};

// Tells apart sets of members that might have the same epoch.
[[nodiscard]] uint64_t number_of(const Roll::Members& members);

struct Welcome {
  Agreed agreed;
  std::vector<Links::Card> cards;  // by rank
};

[[nodiscard]] Bytes encode(const Number& number, std::span<const std::byte> rest);
// `set` is number_of() the members that the vote is to replace.
[[nodiscard]] Bytes encode(const Vote& vote, uint64_t set);
[[nodiscard]] Bytes encode(const Welcome& welcome);

// Takes the number off the payload; nothing if there is none.
[[nodiscard]] std::optional<Number> take_number(std::span<const std::byte>& payload);
// Reads what is left behind the number.
[[nodiscard]] Vote vote_in(const Number& number, std::span<const std::byte> rest);
[[nodiscard]] Welcome welcome_in(
    const Number& number, std::span<const std::byte> rest, size_t num_ranks
);

}  // namespace weft
