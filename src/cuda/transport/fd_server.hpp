// SPDX-License-Identifier: Apache-2.0
// Hands file descriptors to other processes of the same user. A thread answers on a Unix socket
// that has a name but no file, so nothing is left behind when the process is killed. Forked
// children do not get offered descriptors, which would keep memory after its release. vmm.cpp names
// GPU memory to other processes by such descriptors.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

#include "core/context.hpp"
#include "core/descriptor.hpp"

namespace weft {

// Names a descriptor to another process; travels between ranks.
struct FdTicket {
  uint64_t server = 0;
  uint64_t id = 0;
};

class FdServer {
 public:
  // Throws Error (kNotAvailable).
  explicit FdServer(const Context& context);
  ~FdServer();
  FdServer(const FdServer&) = delete;
  FdServer& operator=(const FdServer&) = delete;

  // Any thread. Takes the descriptor over and gives others copies until withdraw().
  [[nodiscard]] FdTicket offer(int fd);
  void withdraw(const FdTicket& ticket);

 private:
  struct Client;
  struct AtFork;  // what happens when this process forks

  void serve() const;
  // Answers a client. Returns false if its question has yet to come.
  [[nodiscard]] bool answer(int connection) const;

  uint64_t name_;
  Descriptor socket_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Descriptor> offered_;
  uint64_t last_id_ = 0;
  bool is_copy_ = false;  // in a child, which has no thread of it
  std::thread thread_;
};

// Returns a copy of the descriptor, the caller's. Throws Error (kNotAvailable) if its process has
// ended, has withdrawn it, or is another user's.
[[nodiscard]] Descriptor fetch_fd(const FdTicket& ticket, const Context& context);

}  // namespace weft
