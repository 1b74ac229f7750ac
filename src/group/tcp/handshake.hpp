// SPDX-License-Identifier: Apache-2.0
// How two ranks prove to each other that they hold the same secret, which itself never travels.
//
//   rank r -> rank 0   Greeting    magic, nonce r
//   rank 0 -> rank r   Challenge   magic, nonce 0, proof over ("rank 0", both nonces)
//   rank r -> rank 0   Hello       version, rank, num_ranks, proof over ("rank r", both nonces, the
//                                  three numbers)
//
// The proofs keep strangers out; what follows is neither encrypted nor signed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "group/control_plane.hpp"

namespace weft {

using Magic = std::array<char, 8>;
using Key = std::array<unsigned char, 32>;
using Nonce = std::array<unsigned char, 32>;
using Proof = std::array<unsigned char, 32>;

inline constexpr Magic kMagic = {'w', 'e', 'f', 't', '-', 'r', 'd', 'v'};

// Greeting and Challenge stay as they are in every version, so that versions can be compared.
struct Greeting {
  Magic magic = kMagic;
  Nonce nonce = {};
};

struct Challenge {
  Magic magic = kMagic;
  Nonce nonce = {};
  Proof proof = {};
};

struct Claim {
  uint32_t version = kProtocolVersion;
  int32_t rank = 0;
  int32_t num_ranks = 0;
};

struct Hello {
  Claim claim;
  Proof proof = {};
};

// Both throw Error (kNotAvailable) if the system gives no random numbers.
[[nodiscard]] Key derive_key(std::string_view secret);
[[nodiscard]] Nonce random_nonce();

// Rank 0's answer to a greeting, and the other side's check of it.
[[nodiscard]] Challenge make_challenge(const Key& key, const Greeting& greeting);
[[nodiscard]] bool is_proven(const Key& key, const Greeting& greeting, const Challenge& challenge);

// The answer to a challenge, and rank 0's check of it.
[[nodiscard]] Hello make_hello(
    const Key& key, const Greeting& greeting, const Challenge& challenge, const Claim& claim
);
[[nodiscard]] bool is_proven(
    const Key& key, const Greeting& greeting, const Challenge& challenge, const Hello& hello
);

}  // namespace weft
