// SPDX-License-Identifier: Apache-2.0
// How ranks find each other over TCP: rank 0 listens, the others connect until it answers, each
// side proves the secret (handshake.hpp), and rank 0 tells all how it ended. A conflict between
// proven ranks ends the group on every rank; a connection that cannot prove the secret is dropped
// and changes nothing.
#pragma once

#include <chrono>
#include <vector>

#include "group/control_plane.hpp"
#include "group/tcp/socket.hpp"
#include "weft/group.hpp"

namespace weft {

// Throws Error (kInvalidArgument) for no ranks, a rank out of range, a short secret, a port outside
// [1, 65535], or no time.
void check_rendezvous(const Rendezvous& rendezvous);

// Does all of Group::connect, with a listener that is already open on rank 0 (unused elsewhere).
[[nodiscard]] Group connect_group(const Rendezvous& rendezvous, Socket listener);

// Rank 0: accepts the others. Returns the connections by rank; its own place stays closed.
[[nodiscard]] std::vector<Socket> admit_ranks(const Rendezvous& rendezvous, Socket listener);

// Every other rank: connects to rank 0 and returns the connection.
[[nodiscard]] Socket join_ranks(const Rendezvous& rendezvous);

// Returns the other ranks' wait: a little longer than rank 0's, which then tells who is missing.
[[nodiscard]] constexpr std::chrono::milliseconds patience(std::chrono::milliseconds timeout) {
  return timeout + timeout / 4;
}

// Returns rank 0's function, for the other ranks' connections by rank (its own place closed). The
// connections are a star around rank 0, which collects the blocks and sends them to all.
[[nodiscard]] AllGather make_tcp_root(std::vector<Socket> peers, std::chrono::milliseconds timeout);

// Returns another rank's function, for its connection to rank 0.
[[nodiscard]] AllGather make_tcp_peer(
    Socket root, const Context& context, std::chrono::milliseconds timeout
);

}  // namespace weft
