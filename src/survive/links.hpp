// SPDX-License-Identifier: Apache-2.0
// A connection of this rank to each other one, over TCP, for what must be heard of while calls run
// and ranks die: small messages, in order, that never make their sender wait. A connection that the
// other side has closed proves that its process has ended; one that only falls silent proves
// nothing.
//
// Each connection begins with a proof, on both sides, that they know the links' token
// (group/tcp/door.hpp). It holds for the place that was connected to only, so that who listens
// elsewhere cannot hand it on.
//
// A rank that is lost may be followed by a new process in its place, its next life
// (survive/roll.hpp). That connects to all ranks that are left, and its connections lie beside the
// old ones until it is taken in. If several processes come for the same turn, a rank listens to the
// first of them until that one ends, and the others try again.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <poll.h>
#include <span>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "group/process_watch.hpp"
#include "group/tcp/door.hpp"
#include "group/tcp/frame.hpp"
#include "group/tcp/socket.hpp"
#include "group/topology.hpp"
#include "weft/group.hpp"

namespace weft {

// The upper half of a life counts the processes that have had its place. The lower half is random
// and tells apart processes that come for the same turn.
constexpr uint64_t turn_of(uint64_t life) {
  return life >> 32;
}
constexpr uint64_t next_life(uint64_t life, uint32_t random) {
  return ((turn_of(life) + 1) << 32) | random;
}

// Used by one thread at a time, but for wake().
class Links {
 public:
  using Token = std::array<uint64_t, 4>;  // which all ranks of these links know

  // Address where a rank can be reached. Trivially copyable.
  struct Card {
    std::array<char, 64> address = {};  // ended by a zero
    int32_t port = 0;
    ProcessPlace place;
  };

  // Collective. Connects over 127.0.0.1 or, if the ranks are on several hosts, the network that
  // WEFT_FABRIC_ADDRESS names. Throws the same Error on every rank.
  Links(const Group& group, std::chrono::milliseconds timeout);
  // Makes links of the next life of a rank, not connected yet. Throws Error (kNotAvailable).
  Links(const Group& group, const Token& token);
  // Begins the next life: connects to `ranks`, which are left. `lives`, `cards`: by rank, of all.
  void join(
      uint64_t life,
      std::span<const int> ranks,
      std::span<const uint64_t> lives,
      std::span<const Card> cards
  );

  [[nodiscard]] const Card& own_card() const { return own_card_; }
  [[nodiscard]] const Token& token() const { return token_; }
  // Returns the cards of all ranks, by rank.
  [[nodiscard]] std::vector<Card> cards() const;

  // Sends what the connection takes at once, and the rest when it does. Nothing is sent to a rank
  // whose connection has ended; what is sent to one that has yet to come waits.
  void send(int rank, FrameKind kind, std::span<const std::byte> payload);
  // Sends to the next life of a rank, if it has come.
  void send_next(int rank, FrameKind kind, std::span<const std::byte> payload);
  // Bytes are unsent, or the other host has not acknowledged them. What it has acknowledged is
  // read there even if this process ends.
  [[nodiscard]] bool has_unsent() const;
  // The process has ended, as far as this host or the connection knows.
  [[nodiscard]] bool has_ended(int rank) const;
  // There is a connection to the rank; or one is yet to come.
  [[nodiscard]] bool is_open(int rank) const;
  [[nodiscard]] bool is_awaited(int rank) const;
  // This next life of a rank has come, and has not ended.
  [[nodiscard]] bool has_next(int rank, uint64_t life) const;

  // Makes `life` the rank's life from now on. If it has no connection yet, this rank `connects`
  // once it has learned where, or the other one will; both may.
  void take(int rank, uint64_t life, bool connects);
  // Takes in the lives that another rank knows, and where they can be reached, by rank. An empty
  // card: unknown.
  void learn(std::span<const uint64_t> lives, std::span<const Card> cards);
  // Notes that the rank is no member: an open connection stays, but none is waited for.
  void dismiss(int rank);

  // Ends all connections: the others take this rank for dead, and nothing is sent any more.
  void close();

  // Returns what to poll() for: bytes that come, room for unsent ones. Other threads may send then.
  [[nodiscard]] std::vector<pollfd> wanted() const;
  // Ends a poll() by `wanted()`. Any thread.
  void wake() const;
  struct Events {
    // Takes a frame that has come from `rank`, in this life of it.
    std::function<void(int rank, uint64_t life, const Frame& frame)> on_frame;
    // Returns the answer to a new process that asks who there is.
    std::function<Bytes()> on_question;
  };
  // Sends what is unsent, accepts connections, and hands the frames that have come to `events`.
  void move(const Events& events);

  // How often a new process asks again.
  static constexpr std::chrono::milliseconds kAskEvery{20};
  // Asks the rank at this address, for a new process, who there is, and returns the answer. Throws
  // Error: kNotAvailable if no rank is there, kTimeout if it does not answer.
  [[nodiscard]] static Bytes ask(
      const std::string& address,
      int port,
      const Token& token,
      const Deadline& deadline,
      const Context& context
  );

 private:
  struct Line {  // a connection, and how far it is read
    Socket socket;
    FrameReader reader;
  };
  struct Link {
    uint64_t life = 0;
    Card card;
    Line line;
    Line other;                  // if both sides have connected: by which the other one sends
    std::optional<Knock> knock;  // of this rank, while it connects
    std::string problem;         // for which no connection was made at the last attempt
    Bytes unsent;
    ProcessWatch watch;       // of a process that this host can watch
    bool is_awaited = false;  // its connection is yet to come
    bool connects = false;    // this rank does, once it knows the card
    Clock::time_point next_try = {};
    bool is_known = false;         // the other side has taken the connection for that of a rank
    bool was_turned_away = false;  // the other side listened to another process for this turn
    bool is_dismissed = false;
    bool has_ended = false;
  };
  // The first bytes of a proven rank on its connection.
  struct Introduction {
    uint64_t life = 0;
    Card card;
  };
  // Connection that has proven the token and has yet to introduce itself.
  struct Arrival {
    Socket socket;
    int rank = 0;
    Deadline deadline = Deadline(kHandshakeTime);
    Introduction said = {};
    size_t done = 0;
  };

  void open_listener(const Group& group);
  void connect_all(const Group& group, std::span<const Bytes> cards, const Deadline& deadline);
  void watch(Link& link) const;
  // Goes on with an attempt to connect, or begins one if it is time to.
  void try_to_connect(Link& link, std::chrono::milliseconds patience = kHandshakeTime) const;
  // Accepts who has proven the token: a rank, or a new process that asks.
  void let_in(const Events& events);
  void answer(Socket socket, const Events& events);
  // Gives an arrival its place once what it has said is whole.
  void seat(Arrival& arrival, const Events& events);
  void queue(Link& link, FrameKind kind, std::span<const std::byte> payload);
  static void push(Link& link);
  static void read(int rank, Link& link, const Events& events);
  static void read_line(int rank, Link& link, Line& line, const Events& events);

  Context context_;
  uint64_t own_life_ = 0;
  Token token_;
  Card own_card_;
  std::optional<Door> door_;
  Descriptor event_;
  std::vector<Link> links_;  // by rank; this rank's own stays closed
  std::vector<Link> next_;   // by rank, of next lives
  std::vector<Link> past_;   // to earlier lives, until these end: one that was only out of reach is
                             // to hear that it was followed, and not to take the others for dead;
                             // and to processes that have asked, until they have their answer
  std::vector<Arrival> arrivals_;
};

}  // namespace weft
