// SPDX-License-Identifier: Apache-2.0
// The server thread and its clients: one message of one byte per descriptor, with the descriptor
// attached (SCM_RIGHTS).
#include "cuda/transport/fd_server.hpp"

#include <chrono>
#include <cstring>
#include <random>
#include <sys/socket.h>
#include <sys/un.h>

#include "core/check.hpp"

namespace weft {
namespace {

// How long to wait for a process that may be stopped. A guess.
constexpr timeval kPatience = {.tv_sec = 10, .tv_usec = 0};

int open_socket(const Context& context) {
  const int type = SOCK_SEQPACKET | SOCK_CLOEXEC;
  return WEFT_SYS(context, ErrorCode::kNotAvailable, ::socket(AF_UNIX, type, 0));
}

// The address of a server. A name that begins with a zero byte makes no file.
struct Address {
  explicit Address(uint64_t server) {
    unix.sun_family = AF_UNIX;
    const std::string name = fmt::format("weft-fd-{:016x}", server);
    name.copy(unix.sun_path + 1, sizeof unix.sun_path - 1);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&unix); }

  sockaddr_un unix = {};
  socklen_t size = 0;
};

// Any process on this host may connect, or may have taken the name.
bool is_same_user(int socket) {
  ucred other = {};
  socklen_t size = sizeof other;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

void set_patience(int socket) {
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    ::setsockopt(socket, SOL_SOCKET, option, &kPatience, sizeof kPatience);
  }
}

// A message of one byte, with room for an attached descriptor.
struct Message {
  Message() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  char byte = 0;
  iovec part = {.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header = {};
};

}  // namespace

FdServer::FdServer(const Context& context)
    : name_(uint64_t{std::random_device()()} << 32U | std::random_device()()),
      socket_(open_socket(context)) {
  const Address address(name_);
  const int fd = socket_.get();
  WEFT_SYS(context, ErrorCode::kNotAvailable, ::bind(fd, address.get(), address.size));
  WEFT_SYS(context, ErrorCode::kNotAvailable, ::listen(fd, SOMAXCONN));
  thread_ = std::thread([this] { serve(); });
}

FdServer::~FdServer() {
  ::shutdown(socket_.get(), SHUT_RDWR);  // ends accept()
  thread_.join();
}

FdTicket FdServer::offer(int fd) {
  const std::lock_guard lock(mutex_);
  offered_.try_emplace(++last_id_, fd);
  return {.server = name_, .id = last_id_};
}

void FdServer::withdraw(const FdTicket& ticket) {
  const std::lock_guard lock(mutex_);
  offered_.erase(ticket.id);
}

void FdServer::serve() const {
  for (;;) {
    const Descriptor connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() >= 0) {
      answer(connection.get());
    } else if (errno == EINVAL) {  // shut down
      return;
    } else {  // most likely too many files are open
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Without a descriptor if there is none of that number.
void FdServer::answer(int connection) const {
  set_patience(connection);
  uint64_t id = 0;
  if (!is_same_user(connection) || ::recv(connection, &id, sizeof id, 0) != sizeof id) {
    return;
  }
  Message message;
  const std::lock_guard lock(mutex_);
  const auto found = offered_.find(id);
  if (found == offered_.end()) {
    message.header.msg_controllen = 0;
  } else {
    cmsghdr* const extra = CMSG_FIRSTHDR(&message.header);
    extra->cmsg_level = SOL_SOCKET;
    extra->cmsg_type = SCM_RIGHTS;
    extra->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = found->second.get();
    std::memcpy(CMSG_DATA(extra), &fd, sizeof fd);
  }
  static_cast<void>(::sendmsg(connection, &message.header, MSG_NOSIGNAL));
}

Descriptor fetch_fd(const FdTicket& ticket, const Context& context) {
  const Descriptor socket(open_socket(context));
  const Address address(ticket.server);
  const int to = socket.get();
  set_patience(to);
  constexpr auto kCode = ErrorCode::kNotAvailable;
  WEFT_SYS(context, kCode, ::connect(to, address.get(), address.size));
  WEFT_CHECK(context, is_same_user(to), kCode, "map: a descriptor of another user's process");
  WEFT_SYS(context, kCode, ::send(to, &ticket.id, sizeof ticket.id, MSG_NOSIGNAL));
  Message message;
  WEFT_SYS(context, kCode, ::recvmsg(to, &message.header, MSG_CMSG_CLOEXEC));
  const cmsghdr* const extra = CMSG_FIRSTHDR(&message.header);
  const bool has_one = extra != nullptr && extra->cmsg_level == SOL_SOCKET &&
                       extra->cmsg_type == SCM_RIGHTS && extra->cmsg_len == CMSG_LEN(sizeof(int));
  WEFT_CHECK(context, has_one, kCode, "map: descriptor {} is no longer offered", ticket.id);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(extra), sizeof fd);
  return Descriptor(fd);
}

}  // namespace weft
