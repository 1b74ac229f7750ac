// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/socket.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

namespace weft {
namespace {

constexpr int kBacklog = 1024;
constexpr int kSocketFlags = SOCK_NONBLOCK | SOCK_CLOEXEC;

const sockaddr* as_sockaddr(const Endpoint& endpoint) {
  return reinterpret_cast<const sockaddr*>(&endpoint.address);
}

Endpoint local_endpoint(const Socket& socket) {
  Endpoint own;
  own.size = sizeof(own.address);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own.address), &own.size) != 0) {
    own.size = 0;
  }
  return own;
}

int port_of(const Endpoint& endpoint) {
  if (endpoint.address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(endpoint.address).sin6_port);
  }
  return ntohs(reinterpret_cast<const sockaddr_in&>(endpoint.address).sin_port);
}

void set_option(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));
}

bool wait_for(const Socket& socket, short events, const Deadline& deadline) {
  pollfd entry = {socket.get(), events, 0};
  while (true) {
    const int ready = poll(&entry, 1, static_cast<int>(deadline.left().count()));
    if (ready > 0) {
      return true;
    }
    if (deadline.has_passed()) {
      return false;
    }
  }
}

// While no process listens on an ephemeral port of this host, a connection there may meet itself,
// and then keep rank 0 from listening there.
bool is_connected_to_itself(const Socket& socket, const Endpoint& peer) {
  const Endpoint own = local_endpoint(socket);
  if (own.size != peer.size || std::memcmp(&own.address, &peer.address, own.size) != 0) {
    return false;
  }
  const linger at_once = {1, 0};
  setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  errno = ECONNREFUSED;
  return true;
}

}  // namespace

std::string endpoint_text(const std::string& address, int port) {
  const bool is_ipv6 = address.find(':') != std::string::npos;
  return is_ipv6 ? fmt::format("[{}]:{}", address, port) : fmt::format("{}:{}", address, port);
}

std::vector<Endpoint> resolve(const std::string& address, int port, const Context& context) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, [](addrinfo* first) {
    if (first != nullptr) {
      freeaddrinfo(first);
    }
  });
  WEFT_CHECK_ARG(
      context, error == 0, "connect: address \"{}\" is not known ({})", address, gai_strerror(error)
  );
  std::vector<Endpoint> endpoints;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    Endpoint& endpoint = endpoints.emplace_back();
    endpoint.size = entry->ai_addrlen;
    std::memcpy(&endpoint.address, entry->ai_addr, entry->ai_addrlen);
  }
  return endpoints;
}

bool is_loopback(const Endpoint& endpoint) {
  if (endpoint.address.ss_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(endpoint.address).sin6_addr);
  }
  const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(endpoint.address);
  return ntohl(ipv4.sin_addr.s_addr) >> 24 == 127;
}

Socket listen_on(const std::string& address, int port, const Context& context) {
  int error = 0;
  for (const Endpoint& endpoint : resolve(address, port, context)) {
    Socket socket(::socket(endpoint.address.ss_family, SOCK_STREAM | kSocketFlags, 0));
    set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
    if (socket.is_open() && bind(socket.get(), as_sockaddr(endpoint), endpoint.size) == 0 &&
        listen(socket.get(), kBacklog) == 0) {
      return socket;
    }
    error = errno;
  }
  const bool is_taken = error == EADDRINUSE;
  WEFT_RAISE(
      context,
      ErrorCode::kNotAvailable,
      "connect: cannot listen on {} ({}){}",
      endpoint_text(address, port),
      std::strerror(error),
      is_taken ? ". Another rank 0 or another program holds the port; choose another" : ""
  );
}

int port_of(const Socket& listener) {
  return port_of(local_endpoint(listener));
}

Socket accept_from(const Socket& listener, std::string& host) {
  sockaddr_storage from = {};
  socklen_t size = sizeof from;
  auto* const address = reinterpret_cast<sockaddr*>(&from);
  Socket socket(accept4(listener.get(), address, &size, kSocketFlags));
  if (socket.is_open()) {
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    std::array<char, NI_MAXHOST> text = {};
    getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    host = text.data();
  }
  return socket;
}

Socket begin_connect(const Endpoint& endpoint) {
  Socket socket(::socket(endpoint.address.ss_family, SOCK_STREAM | kSocketFlags, 0));
  const bool is_begun =
      socket.is_open() &&
      (connect(socket.get(), as_sockaddr(endpoint), endpoint.size) == 0 || errno == EINPROGRESS);
  return is_begun ? std::move(socket) : Socket();
}

IoState finish_connect(const Socket& socket, const Endpoint& endpoint) {
  if (!wait_for(socket, POLLOUT, Deadline(std::chrono::milliseconds(0)))) {
    return IoState::kMore;
  }
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  if (error != 0 || is_connected_to_itself(socket, endpoint)) {
    return IoState::kClosed;
  }
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  return IoState::kDone;
}

Socket connect_to(const Endpoint& endpoint, const Deadline& deadline) {
  Socket socket = begin_connect(endpoint);
  if (!socket.is_open()) {
    return socket;
  }
  if (!wait_for(socket, POLLOUT, deadline)) {
    errno = ETIMEDOUT;
    return {};
  }
  return finish_connect(socket, endpoint) == IoState::kDone ? std::move(socket) : Socket();
}

bool wait_readable(const Socket& socket, const Deadline& deadline) {
  return wait_for(socket, POLLIN, deadline);
}

IoState receive_some(const Socket& socket, std::span<std::byte> bytes, size_t& done) {
  while (done < bytes.size()) {
    const auto count = recv(socket.get(), bytes.data() + done, bytes.size() - done, 0);
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return IoState::kMore;
    } else if (count == 0 || errno != EINTR) {
      return IoState::kClosed;
    }
  }
  return IoState::kDone;
}

IoState send_all(const Socket& socket, std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    const auto count = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(socket, POLLOUT, deadline)) {
        return IoState::kMore;
      }
    } else if (errno != EINTR) {
      return IoState::kClosed;
    }
  }
  return IoState::kDone;
}

IoState receive_all(const Socket& socket, std::span<std::byte> bytes, const Deadline& deadline) {
  size_t done = 0;
  while (true) {
    const IoState state = receive_some(socket, bytes, done);
    if (state != IoState::kMore || !wait_readable(socket, deadline)) {
      return state;
    }
  }
}

}  // namespace weft
