// SPDX-License-Identifier: Apache-2.0
// A connection to rank 0 that has not yet proven the secret: a rank, or a stranger.
#pragma once

#include "core/clock.hpp"
#include "group/handshake.hpp"
#include "group/socket.hpp"

namespace weft {

enum class GuestState : uint8_t {
  kWaiting,
  kProven,
  kOtherSecret,  // it speaks the protocol, but with another secret
  kGone,         // closed, too slow, or not one of us
};

class Guest {
 public:
  explicit Guest(Socket socket) : socket_(std::move(socket)) {}

  // Takes what has arrived, without waiting.
  [[nodiscard]] GuestState advance(const Key& key);

  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] Socket take_socket() { return std::move(socket_); }
  // True only of a proven guest.
  [[nodiscard]] const Claim& claim() const { return hello_.claim; }

 private:
  // Honest ranks answer at once.
  static constexpr auto kTime = std::chrono::seconds(5);

  [[nodiscard]] IoState take_greeting(const Key& key);

  Socket socket_;
  Deadline deadline_{kTime};
  size_t done_ = 0;  // bytes of the message being received
  bool is_challenged_ = false;
  Greeting greeting_;
  Challenge challenge_;
  Hello hello_;
};

}  // namespace weft
