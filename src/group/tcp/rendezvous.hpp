// SPDX-License-Identifier: Apache-2.0
// How ranks find each other over TCP: rank 0 listens, the others knock until it opens, each side
// proves the secret (handshake.hpp), and rank 0 tells all how it ended. A conflict between proven
// ranks ends the group on every rank; whoever cannot prove the secret is dropped and changes
// nothing.
#pragma once

#include <chrono>
#include <vector>

#include "group/control_plane.hpp"
#include "group/tcp/socket.hpp"
#include "weft/group.hpp"

namespace weft {

// Throws Error (kInvalidArgument): no ranks, rank out of range, a short secret, a port outside
// [1, 65535], no time.
void check_rendezvous(const Rendezvous& rendezvous);

// The whole of Group::connect, with a listener that is already open on rank 0 (unused elsewhere).
[[nodiscard]] Group connect_group(const Rendezvous& rendezvous, Socket listener);

// Rank 0. Returns the connections by rank; its own place stays closed.
[[nodiscard]] std::vector<Socket> admit_ranks(const Rendezvous& rendezvous, Socket listener);

// Every other rank. Returns the connection to rank 0.
[[nodiscard]] Socket join_ranks(const Rendezvous& rendezvous);

// Others wait a little longer than rank 0 does, so that they hear from it who was missing.
[[nodiscard]] constexpr std::chrono::milliseconds patience(std::chrono::milliseconds timeout) {
  return timeout + timeout / 4;
}

// The functions of a group are a star of connections around rank 0, which collects the blocks and
// sends them to all. Rank 0's, with the other ranks' connections by rank (its own place closed).
[[nodiscard]] AllGather make_tcp_root(std::vector<Socket> peers, std::chrono::milliseconds timeout);

// Another rank's, with its connection to rank 0.
[[nodiscard]] AllGather make_tcp_peer(
    Socket root, const Context& context, std::chrono::milliseconds timeout
);

}  // namespace weft
