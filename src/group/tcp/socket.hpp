// SPDX-License-Identifier: Apache-2.0
// TCP sockets that never block: every wait is a poll() with a deadline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <sys/socket.h>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/descriptor.hpp"

namespace weft {

using Socket = Descriptor;

struct Endpoint {
  sockaddr_storage address = {};
  socklen_t size = 0;
};

// Returns "127.0.0.1:5000", "[::1]:5000".
[[nodiscard]] std::string endpoint_text(const std::string& address, int port);

// Returns all endpoints of a name or number. Throws Error (kInvalidArgument) naming the address.
[[nodiscard]] std::vector<Endpoint> resolve(
    const std::string& address, int port, const Context& context
);
[[nodiscard]] bool is_loopback(const Endpoint& endpoint);

// Listens on the first of the address's endpoints that this host has, and on nothing else. Port 0:
// a free one. Throws Error (kNotAvailable), e.g. when the port is taken.
[[nodiscard]] Socket listen_on(const std::string& address, int port, const Context& context);
[[nodiscard]] int port_of(const Socket& listener);
// Accepts a waiting connection; `host` is the numeric address that it comes from. Not open if there
// is none, or no file for it; errno says which.
[[nodiscard]] Socket accept_from(const Socket& listener, std::string& host);
// Begins an attempt to connect. Not open on failure; errno says why.
[[nodiscard]] Socket begin_connect(const Endpoint& endpoint);
// Makes one attempt to connect, to its end. Not open on failure; errno says why.
[[nodiscard]] Socket connect_to(const Endpoint& endpoint, const Deadline& deadline);

// Waits for bytes or the end of the connection; false when the deadline passed.
[[nodiscard]] bool wait_readable(const Socket& socket, const Deadline& deadline);

enum class IoState : uint8_t { kDone, kMore, kClosed };

// Returns the state of the attempt. kClosed: it has failed; errno says why.
[[nodiscard]] IoState finish_connect(const Socket& socket, const Endpoint& endpoint);

// Fills `bytes` from `done` on as far as possible without waiting.
[[nodiscard]] IoState receive_some(const Socket& socket, std::span<std::byte> bytes, size_t& done);
// These send and receive all of `bytes`. kMore: the deadline passed.
[[nodiscard]] IoState send_all(
    const Socket& socket, std::span<const std::byte> bytes, const Deadline& deadline
);
[[nodiscard]] IoState receive_all(
    const Socket& socket, std::span<std::byte> bytes, const Deadline& deadline
);

}  // namespace weft
