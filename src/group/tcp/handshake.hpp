// SPDX-License-Identifier: Apache-2.0
// How two ranks prove to each other that they hold the same secret, without revealing it.
//
//   rank r -> rank 0   Greeting   magic, key share r
//   rank 0 -> rank r   Greeting   magic, key share 0
//   rank r -> rank 0   Hello      version, rank, num_ranks, proof over these and "rank r"
//   rank 0 -> rank r   Proof      over the same three numbers and "rank 0"
//
// This is a balanced password-authenticated key exchange (as CPace, on ristretto255): a key share
// is a random multiple of a point that the secret determines, and only who knows the point gets the
// same key from both shares. So nothing that travels, and no answer to a share of one's own making,
// lets an attacker try secrets offline: each connection tries one. The side that connects proves
// first, and a side that does not prove the secret gets no proof in return.
//
// The proofs keep strangers out; what follows is neither encrypted nor signed.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "group/control_plane.hpp"

namespace weft {

using Magic = std::array<char, 8>;
using Point = std::array<unsigned char, 32>;
using Proof = std::array<unsigned char, 32>;

inline constexpr Magic kMagic = {'w', 'e', 'f', 't', '-', 'r', 'v', '4'};

// The greeting is the same in every version, so that versions can be compared.
struct Greeting {
  Magic magic = kMagic;
  Point share = {};
};

struct Claim {
  uint32_t version = kProtocolVersion;
  int32_t rank = 0;
  int32_t num_ranks = 0;
};

// Rank 0 answers a proof that is wrong with one of zeros.
struct Hello {
  Claim claim;
  Proof proof = {};
};

// Returns the point that a secret determines. Throws Error (kNotAvailable) if the system gives no
// random numbers.
[[nodiscard]] Point point_of(std::string_view secret);

// One side of one conversation.
class Handshake {
 public:
  enum class Side : uint8_t { kPeer, kRoot };

  Handshake(const Point& secret, Side side);
  [[nodiscard]] const Greeting& greeting() const { return own_; }
  // Takes the other side's greeting; false: `other` is none.
  [[nodiscard]] bool hear(const Greeting& other);
  // Returns `side`'s proof of the claim; after hear().
  [[nodiscard]] Proof prove(Side side, const Claim& claim) const;
  [[nodiscard]] bool is_proven(Side side, const Claim& claim, const Proof& proof) const;

 private:
  Side side_;
  std::array<unsigned char, 32> factor_;
  Greeting own_;
  std::array<unsigned char, 32> key_ = {};
};

}  // namespace weft
