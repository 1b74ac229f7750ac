// SPDX-License-Identifier: Apache-2.0
// A connection of this rank to each other one, over TCP, for what must be heard of while calls run
// and ranks die: small messages, in order, that never make their sender wait. A connection that the
// other side has closed proves that its process has ended; one that only falls silent proves
// nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <poll.h>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "group/process_watch.hpp"
#include "group/tcp/frame.hpp"
#include "group/tcp/socket.hpp"
#include "weft/group.hpp"

namespace weft {

// One thread at a time, but for wake().
class Links {
 public:
  // Collective. Over 127.0.0.1 or, if the ranks are on several hosts, the network that
  // WEFT_FABRIC_ADDRESS names. Throws the same Error on every rank.
  Links(const Group& group, std::chrono::milliseconds timeout);

  // What the connection does not take at once goes when it does. Nothing is sent to a rank whose
  // connection has ended.
  void send(int rank, FrameKind kind, std::span<const std::byte> payload);
  // Something has not gone yet.
  [[nodiscard]] bool has_unsent() const;
  // The process has ended, as far as this host or the connection knows.
  [[nodiscard]] bool has_ended(int rank) const;

  // For poll(), while other threads may send: when something comes, or can go that has not yet.
  [[nodiscard]] std::vector<pollfd> wanted() const;
  // Ends a poll() by `wanted()`. Any thread.
  void wake() const;
  // Sends what has not gone, and tells what has come, from whom.
  void move(const std::function<void(int rank, const Frame& frame)>& on_frame);

 private:
  struct Link {
    Socket socket;
    FrameReader reader;
    Bytes unsent;
    ProcessWatch watch;  // of a process that this host can watch
    bool has_ended = false;
  };

  void connect(const Group& group, std::span<const Bytes> cards, const Deadline& deadline);
  void accept_higher(const Deadline& deadline);
  void push(Link& link);
  // The other side closed it, or it is broken.
  void end(Link& link, int error);

  Context context_;
  std::array<uint64_t, 4> token_ = {};  // that all ranks of these links know
  Socket listener_;
  Descriptor event_;
  std::vector<Link> links_;  // by rank; this rank's own stays closed
};

}  // namespace weft
