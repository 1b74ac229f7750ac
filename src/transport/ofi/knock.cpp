// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/knock.hpp"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>

#include "core/descriptor.hpp"

namespace weft::ofi {
namespace {

constexpr int kPatienceMs = 20;

}  // namespace

bool is_refused(const Bytes& address) {
  sockaddr_storage place = {};
  if (address.size() < sizeof(sa_family_t) || address.size() > sizeof place) {
    return false;
  }
  std::memcpy(&place, address.data(), address.size());
  if (place.ss_family != AF_INET && place.ss_family != AF_INET6) {
    return false;
  }
  const Descriptor socket(::socket(place.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const auto* const to = reinterpret_cast<const sockaddr*>(&place);
  if (::connect(socket.get(), to, static_cast<socklen_t>(address.size())) == 0) {
    return false;
  }
  if (errno != EINPROGRESS) {
    return errno == ECONNREFUSED;
  }
  pollfd wanted = {.fd = socket.get(), .events = POLLOUT, .revents = 0};
  if (::poll(&wanted, 1, kPatienceMs) <= 0) {
    return false;
  }
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 &&
         error == ECONNREFUSED;
}

}  // namespace weft::ofi
