// SPDX-License-Identifier: Apache-2.0
// The handshake (handshake.hpp) over TCP, as its bytes come: a Knock is the side that connects, a
// Door the side that listens, a Guest one connection to a Door. None ever waits but for finish().
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <poll.h>
#include <string>
#include <vector>

#include "core/clock.hpp"
#include "group/tcp/handshake.hpp"
#include "group/tcp/socket.hpp"

namespace weft {

// Longest time of a handshake; ranks answer at once.
inline constexpr std::chrono::milliseconds kHandshakeTime = std::chrono::seconds(5);

enum class TalkState : uint8_t {
  kWaiting,
  kProven,
  kOtherSecret,  // the other side speaks the protocol, but with another secret
  kGone,         // closed, too slow, or not one of us
};

// A connection that is being made, on which both sides are to prove the secret.
class Knock {
 public:
  Knock(
      const Endpoint& endpoint, const Point& secret, const Claim& claim, const Deadline& deadline
  );

  // Does what can be done by now.
  [[nodiscard]] TalkState advance();
  // Waits until advance() no longer returns kWaiting.
  [[nodiscard]] TalkState finish();
  [[nodiscard]] pollfd wanted() const;
  [[nodiscard]] bool has_connected() const { return handshake_.has_value(); }
  // Returns why advance() returned kGone.
  [[nodiscard]] const std::string& problem() const { return problem_; }
  [[nodiscard]] Socket take_socket() { return std::move(socket_); }

 private:
  [[nodiscard]] TalkState fail(std::string problem);
  // Returns the state after a part that has not come whole.
  [[nodiscard]] TalkState wait(IoState state, std::string problem);

  Endpoint endpoint_;
  Point secret_;
  Claim claim_;
  Deadline deadline_;
  Socket socket_;
  int error_ = 0;  // for which there is no socket
  std::optional<Handshake> handshake_;
  bool has_heard_ = false;
  size_t done_ = 0;  // bytes of the message being received
  Greeting greeting_;
  Proof proof_ = {};
  std::string problem_;
};

// A connection to a Door that has not yet proven the secret: a rank's, or a stranger's.
class Guest {
 public:
  Guest(Socket socket, std::string host) : socket_(std::move(socket)), host_(std::move(host)) {}

  // Does what can be done by now.
  [[nodiscard]] TalkState advance(const Point& secret);
  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] Socket take_socket() { return std::move(socket_); }
  [[nodiscard]] const std::string& host() const { return host_; }
  [[nodiscard]] bool has_greeted() const { return handshake_.has_value(); }
  // Returns the claim, which is true only after kProven.
  [[nodiscard]] const Claim& claim() const { return hello_.claim; }

 private:
  [[nodiscard]] IoState take_greeting(const Point& secret);

  Socket socket_;
  std::string host_;
  Deadline deadline_{kHandshakeTime};
  size_t done_ = 0;  // bytes of the message being received
  Greeting greeting_;
  std::optional<Handshake> handshake_;
  Hello hello_;
};

// A listener and its unproven connections. Strangers hold no more than `most` places and no file
// that a rank needs: a connection that has sent nothing gives way to a new one.
class Door {
 public:
  // Connections that proved nothing: their number, and of each kind a few.
  struct Strangers {
    uint64_t number = 0;
    std::vector<std::string> hosts;
    std::vector<int> other_secret;  // ranks that they claim
    bool had_too_few_files = false;
  };

  Door(Socket listener, const Point& secret, size_t most);

  // Returns what to poll() for.
  [[nodiscard]] std::vector<pollfd> wanted() const;
  // Accepts some new connections, and reads all. Returns those that have proven the secret.
  [[nodiscard]] std::vector<Guest> let_in();
  // The last let_in() accepted none, as this process has no file left even for one connection.
  [[nodiscard]] bool is_stuck() const {
    return has_no_room_ && strangers_.had_too_few_files && guests_.empty();
  }
  [[nodiscard]] const Strangers& strangers() const { return strangers_; }
  void show_out_all() { guests_.clear(); }

  static constexpr size_t kMostNotes = 4;

 private:
  // False: no connection is pending, or there is no file for it.
  [[nodiscard]] bool accept_one();
  void show_out_one();
  void note_stranger(const Guest& guest);

  Socket listener_;
  Point secret_;
  size_t most_;
  std::vector<Guest> guests_;  // in the order in which they came
  Strangers strangers_;
  bool has_no_room_ = false;
};

}  // namespace weft
