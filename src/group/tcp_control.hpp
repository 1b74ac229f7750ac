// SPDX-License-Identifier: Apache-2.0
// A star of connections around rank 0, which collects the blocks and sends them to all.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "group/control_plane.hpp"
#include "group/socket.hpp"

namespace weft {

// Rank 0, with the other ranks' connections by rank (its own place closed).
[[nodiscard]] std::unique_ptr<ControlPlane> make_tcp_root(
    std::vector<Socket> peers, std::chrono::milliseconds timeout
);

// Another rank, with its connection to rank 0.
[[nodiscard]] std::unique_ptr<ControlPlane> make_tcp_peer(
    Socket root, const Context& context, std::chrono::milliseconds timeout
);

}  // namespace weft
