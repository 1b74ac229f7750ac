// SPDX-License-Identifier: Apache-2.0
// The server thread and its clients: a reply is one byte with the descriptor attached (SCM_RIGHTS).
#include "cuda/transport/fd_server.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <pthread.h>
#include <random>
#include <set>
#include <sys/socket.h>
#include <sys/un.h>

#include "core/check.hpp"
#include "core/clock.hpp"

namespace weft {
namespace {

// Longest wait for a process that may be stopped. A guess.
constexpr auto kPatience = std::chrono::seconds(10);

int open_socket(const Context& context) {
  const int type = SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK;
  return WEFT_SYS(context, ErrorCode::kNotAvailable, ::socket(AF_UNIX, type, 0));
}

// Returns the result of a system call, repeated until the deadline while a signal interrupts it or
// the socket is not ready. poll() knows nothing of a socket that is not connected.
template <class SystemCall>
auto patient(const pollfd& socket, const Deadline& deadline, const SystemCall& call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || (errno != EINTR && errno != EAGAIN)) {
      return result;
    }
    if (deadline.has_passed()) {
      errno = ETIMEDOUT;
      return result;
    }
    pollfd entry = socket;
    const auto time = entry.fd < 0 ? std::chrono::milliseconds(1) : deadline.left();
    ::poll(&entry, 1, errno == EINTR ? 0 : static_cast<int>(time.count()));
  }
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

// Returns whether the other end is this user's: any process on this host may connect, or may have
// taken the name.
bool is_same_user(int socket) {
  ucred other = {};
  socklen_t size = sizeof other;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
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

// Holds all servers of this process while it forks, so that a child finds them whole.
struct FdServer::AtFork {
  std::mutex mutex;
  std::set<FdServer*> servers;

  static AtFork& instance() {
    static AtFork& one = []() -> AtFork& {
      ::pthread_atfork(&prepare, &go_on, &close_in_child);
      return *new AtFork;  // never destroyed: a process may fork while it ends
    }();
    return one;
  }

 private:
  static void prepare() {
    instance().mutex.lock();
    std::ranges::for_each(instance().servers, [](FdServer* one) { one->mutex_.lock(); });
  }
  static void go_on() {
    std::ranges::for_each(instance().servers, [](FdServer* one) { one->mutex_.unlock(); });
    instance().mutex.unlock();
  }
  static void close_in_child() {
    for (FdServer* const one : instance().servers) {
      one->is_copy_ = true;
      one->socket_.close();
      std::ranges::for_each(one->offered_, [](auto& entry) { entry.second.close(); });
    }
    go_on();
  }
};

FdServer::FdServer(const Context& context)
    : name_(uint64_t{std::random_device()()} << 32U | std::random_device()()),
      socket_(open_socket(context)) {
  const Address address(name_);
  const int fd = socket_.get();
  WEFT_SYS(context, ErrorCode::kNotAvailable, ::bind(fd, address.get(), address.size));
  WEFT_SYS(context, ErrorCode::kNotAvailable, ::listen(fd, SOMAXCONN));
  thread_ = std::thread([this] { serve(); });
  AtFork& at_fork = AtFork::instance();
  const std::lock_guard lock(at_fork.mutex);
  at_fork.servers.insert(this);
}

FdServer::~FdServer() {
  {
    AtFork& at_fork = AtFork::instance();
    const std::lock_guard lock(at_fork.mutex);
    at_fork.servers.erase(this);
  }
  if (is_copy_) {
    thread_.detach();
    return;
  }
  ::shutdown(socket_.get(), SHUT_RDWR);  // ends the thread
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

struct FdServer::Client {
  Descriptor connection;
  Deadline deadline = Deadline(kPatience);
};

void FdServer::serve() const {
  std::vector<Client> clients;
  for (;;) {
    std::vector<pollfd> entries = {{.fd = socket_.get(), .events = POLLIN, .revents = 0}};
    for (const Client& client : clients) {
      entries.push_back({.fd = client.connection.get(), .events = POLLIN, .revents = 0});
    }
    ::poll(entries.data(), entries.size(), clients.empty() ? -1 : 100);
    if ((entries.front().revents & POLLHUP) != 0) {  // shut down
      return;
    }
    Descriptor connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (connection.is_open() && is_same_user(connection.get())) {
      clients.push_back({.connection = std::move(connection)});
    } else if (!connection.is_open() && errno != EAGAIN) {  // most likely too many files are open
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::erase_if(clients, [this](const Client& client) {
      return answer(client.connection.get()) || client.deadline.has_passed();
    });
  }
}

// Replies without a descriptor if none has the number asked for.
bool FdServer::answer(int connection) const {
  uint64_t id = 0;
  const ssize_t size = ::recv(connection, &id, sizeof id, 0);
  if (size == -1 && (errno == EAGAIN || errno == EINTR)) {
    return false;
  }
  if (size != sizeof id) {
    return true;
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
  // One message fits the connection, so this does not wait.
  while (::sendmsg(connection, &message.header, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
  return true;
}

Descriptor fetch_fd(const FdTicket& ticket, const Context& context) {
  const Descriptor socket(open_socket(context));
  const Address address(ticket.server);
  const int to = socket.get();
  const Deadline deadline(kPatience);
  constexpr auto kCode = ErrorCode::kNotAvailable;
  const auto wait = [&](int fd, short events, const auto& call) {
    return patient({.fd = fd, .events = events, .revents = 0}, deadline, call);
  };
  const auto connect = [&] { return ::connect(to, address.get(), address.size); };
  WEFT_SYS(context, kCode, wait(-1, 0, connect));
  WEFT_CHECK(context, is_same_user(to), kCode, "map: a descriptor of another user's process");
  const auto ask = [&] { return ::send(to, &ticket.id, sizeof ticket.id, MSG_NOSIGNAL); };
  WEFT_SYS(context, kCode, wait(to, POLLOUT, ask));
  Message message;
  // recvmsg() may report the end of the connection although a message arrived just before it: Linux
  // looks for the two one after the other. Once poll() has seen either, the message is found.
  const auto receive = [&]() -> ssize_t {
    pollfd entry = {.fd = to, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&entry, 1, 0);
    if (ready > 0) {
      return ::recvmsg(to, &message.header, MSG_CMSG_CLOEXEC);
    }
    errno = ready == 0 ? EAGAIN : errno;
    return -1;
  };
  WEFT_SYS(context, kCode, wait(to, POLLIN, receive));
  const cmsghdr* const extra = CMSG_FIRSTHDR(&message.header);
  const bool has_one = extra != nullptr && extra->cmsg_level == SOL_SOCKET &&
                       extra->cmsg_type == SCM_RIGHTS && extra->cmsg_len == CMSG_LEN(sizeof(int));
  WEFT_CHECK(context, has_one, kCode, "map: descriptor {} is no longer offered", ticket.id);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(extra), sizeof fd);
  return Descriptor(fd);
}

}  // namespace weft
