// SPDX-License-Identifier: Apache-2.0
// Context of messages, and the one function that throws. This is not in check.hpp because nvcc does
// not compile fmt.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "weft/error.hpp"

namespace weft {

// Rank that speaks; appended to every message as "[rank 2/8, shm]".
struct Context {
  int rank = -1;  // -1: no group involved, nothing is appended
  int num_ranks = 0;
  std::string_view transport = {};
  int lost_peer = -1;  // whom a LostPeerError is about; -1: errors are of the other kinds

  [[nodiscard]] Context without(int peer) const { return {rank, num_ranks, transport, peer}; }
};

// Says that a peer has died, left or broken off, so that this rank cannot reach what it wanted to:
// the peer's own error or end is the cause.
class LostPeerError final : public Error {
 public:
  LostPeerError(Error error, int peer) : Error(std::move(error)), peer_(peer) {}
  [[nodiscard]] int peer() const { return peer_; }

 private:
  int peer_;
};

// Throws TimeoutError or PeerError for their codes, else LostPeerError if the context names a peer,
// else Error. The last two stand for the caller's place (clang 14 has no std::source_location).
[[noreturn]] void raise_error(
    ErrorCode code,
    const Context& context,
    const std::string& problem,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()
);

}  // namespace weft
