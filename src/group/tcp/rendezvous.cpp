// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/rendezvous.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <poll.h>
#include <string>
#include <thread>

#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/frame.hpp"
#include "group/tcp/handshake.hpp"
#include "group/tcp/socket.hpp"

namespace weft {
namespace {

constexpr auto kPeer = Handshake::Side::kPeer;
constexpr auto kRoot = Handshake::Side::kRoot;

// --- rank 0's side ---

enum class GuestState : uint8_t {
  kWaiting,
  kProven,
  kOtherSecret,  // it speaks the protocol, but with another secret
  kGone,         // closed, too slow, or not one of us
};

// A connection to rank 0 that has not yet proven the secret: a rank, or a stranger.
class Guest {
 public:
  Guest(Socket socket, std::string host) : socket_(std::move(socket)), host_(std::move(host)) {}

  // Takes what has arrived, without waiting.
  [[nodiscard]] GuestState advance(const Point& secret) {
    IoState state = handshake_ ? IoState::kDone : take_greeting(secret);
    if (state == IoState::kDone) {
      state = take(hello_);
    }
    if (state != IoState::kDone) {
      const bool may_go_on = state == IoState::kMore && !deadline_.has_passed();
      return may_go_on ? GuestState::kWaiting : GuestState::kGone;
    }
    const bool is_proven = handshake_->is_proven(kPeer, hello_.claim, hello_.proof);
    send(is_proven ? handshake_->prove(kRoot, hello_.claim) : Proof{});
    return is_proven ? GuestState::kProven : GuestState::kOtherSecret;
  }

  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] Socket take_socket() { return std::move(socket_); }
  [[nodiscard]] const std::string& host() const { return host_; }
  [[nodiscard]] bool has_greeted() const { return handshake_.has_value(); }
  // True only of a proven guest.
  [[nodiscard]] const Claim& claim() const { return hello_.claim; }

 private:
  // Honest ranks answer at once.
  static constexpr auto kTime = std::chrono::seconds(5);

  template <class Message>
  [[nodiscard]] IoState take(Message& message) {
    return receive_some(socket_, std::as_writable_bytes(std::span(&message, 1)), done_);
  }

  // So few bytes fit the buffer of a fresh connection: no wait.
  template <class Message>
  void send(const Message& message) {
    const Deadline now(std::chrono::milliseconds(0));
    static_cast<void>(send_all(socket_, std::as_bytes(std::span(&message, 1)), now));
  }

  [[nodiscard]] IoState take_greeting(const Point& secret) {
    const IoState state = take(greeting_);
    if (state != IoState::kDone) {
      return state;
    }
    Handshake handshake(secret, kRoot);
    if (!handshake.hear(greeting_)) {
      return IoState::kClosed;
    }
    send(handshake.greeting());
    handshake_ = handshake;
    done_ = 0;
    return state;
  }

  Socket socket_;
  std::string host_;
  Deadline deadline_{kTime};
  size_t done_ = 0;  // bytes of the message being received
  Greeting greeting_;
  std::optional<Handshake> handshake_;
  Hello hello_;
};

// Strangers can hold no more places than this.
constexpr size_t kMaxGuests = 1024;
// Guests let in before all are looked at, so that whoever comes last finds those before him heard.
constexpr size_t kMaxAccepts = 64;
constexpr size_t kMaxNotes = 4;
// Slow guests are looked at this often.
constexpr auto kTick = std::chrono::milliseconds(250);

class Admission {
 public:
  Admission(const Rendezvous& rendezvous, Socket listener)
      : rendezvous_(rendezvous),
        context_{0, rendezvous.num_ranks, "tcp"},
        place_(endpoint_text(rendezvous.address, port_of(listener))),
        secret_(point_of(rendezvous.secret)),
        listener_(std::move(listener)),
        joined_(static_cast<size_t>(rendezvous.num_ranks)) {}

  std::vector<Socket> run() {
    const Deadline deadline(rendezvous_.timeout);
    while (!missing().empty()) {
      if (deadline.has_passed()) {
        end({ErrorCode::kTimeout, missing_text()}, 0);
      }
      wait(deadline);
      if (had_too_few_files_ && guests_.empty()) {
        end({ErrorCode::kNotAvailable, "connect: cannot accept a connection. " + files_text()}, 0);
      }
      sort_guests();
      while (!proven_.empty()) {
        Guest guest = std::move(proven_.back());
        proven_.pop_back();
        admit(guest);
      }
      check_joined();
    }
    guests_.clear();  // their files are free for what ranks open now
    for (const Socket& socket : joined_) {
      if (socket.is_open()) {  // one that has gone since is noticed at the first all_gather
        static_cast<void>(send_frame(socket, FrameKind::kWelcome, {}, Deadline(kTick)));
      }
    }
    return std::move(joined_);
  }

 private:
  [[nodiscard]] std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < rendezvous_.num_ranks; ++rank) {
      if (!joined_[static_cast<size_t>(rank)].is_open()) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  [[nodiscard]] std::string missing_text() const {
    std::string text = fmt::format(
        "connect: {} did not join at {} within {}",
        rank_list(missing()),
        place_,
        seconds_text(rendezvous_.timeout)
    );
    if (!other_secret_.empty()) {
      text += fmt::format(
          " (a connection that calls itself {} proved another secret)", rank_list(other_secret_)
      );
    }
    if (num_strangers_ > 0) {
      text += fmt::format(
          " ({} connections proved nothing, of {}{})",
          num_strangers_,
          fmt::join(strangers_, ", "),
          strangers_.size() == kMaxNotes ? " and perhaps others" : ""
      );
    }
    if (had_too_few_files_) {
      text += fmt::format(" ({})", files_text());
    }
    return text;
  }

  // Sleeps until something happens, then lets some new guests in.
  void wait(const Deadline& deadline) {
    std::vector<pollfd> entries = {{listener_.get(), POLLIN, 0}};
    for (const Guest& guest : guests_) {
      entries.push_back({guest.socket().get(), POLLIN, 0});
    }
    for (const Socket& socket : joined_) {
      entries.push_back({socket.get(), POLLIN, 0});  // a closed place is skipped by poll()
    }
    const auto time = std::min<std::chrono::milliseconds>(deadline.left(), kTick);
    poll(entries.data(), entries.size(), static_cast<int>(time.count()));
    for (size_t i = 0; i < kMaxAccepts && accept_one(); ++i) {
    }
  }

  // False: nobody waits, or there is no file for him.
  bool accept_one() {
    std::string host;
    Socket socket = accept_from(listener_, host);
    while (!socket.is_open() && (errno == EMFILE || errno == ENFILE)) {
      had_too_few_files_ = true;
      if (guests_.empty()) {
        return false;
      }
      show_out_one();
      socket = accept_from(listener_, host);
    }
    if (!socket.is_open()) {
      return false;
    }
    if (guests_.size() == kMaxGuests) {
      show_out_one();
    }
    guests_.emplace_back(std::move(socket), std::move(host));
    return true;
  }

  // Who has waited longest, of those who have not even greeted if there are any.
  void show_out_one() {
    const auto silent = std::ranges::find_if_not(guests_, &Guest::has_greeted);
    const auto one = silent == guests_.end() ? guests_.begin() : silent;
    note_stranger(*one);
    guests_.erase(one);
  }

  [[nodiscard]] static std::string files_text() {
    return "Rank 0 may open too few files; raise the limit (ulimit -n)";
  }

  void sort_guests() {
    std::vector<Guest> waiting;
    for (Guest& guest : guests_) {
      switch (guest.advance(secret_)) {
        case GuestState::kProven:
          proven_.push_back(std::move(guest));
          break;
        case GuestState::kWaiting:
          waiting.push_back(std::move(guest));
          break;
        case GuestState::kOtherSecret:
          note(other_secret_, guest.claim().rank);
          break;
        case GuestState::kGone:
          note_stranger(guest);
          break;
      }
    }
    guests_ = std::move(waiting);
  }

  template <class Value>
  static void note(std::vector<Value>& notes, const Value& value) {
    if (std::ranges::find(notes, value) == notes.end() && notes.size() < kMaxNotes) {
      notes.push_back(value);
    }
  }

  void note_stranger(const Guest& guest) {
    ++num_strangers_;
    note(strangers_, guest.host());
  }

  void admit(Guest& guest) {
    if (std::string text = conflict(guest.claim()); !text.empty()) {
      const Failure failure = {ErrorCode::kInvalidArgument, std::move(text)};
      const int num_ranks = std::max(rendezvous_.num_ranks, guest.claim().num_ranks);
      send_failure(guest.socket(), failure);
      end(failure, num_ranks - 2);  // without rank 0 and the guest
    }
    joined_[static_cast<size_t>(guest.claim().rank)] = guest.take_socket();
  }

  // Why a proven guest cannot join; empty: it can.
  [[nodiscard]] std::string conflict(const Claim& claim) const {
    if (claim.version != kProtocolVersion) {
      return fmt::format(
          "connect: rank {} speaks version {} (rank 0: {}). Run the same Weft on all ranks",
          claim.rank,
          claim.version,
          kProtocolVersion
      );
    }
    if (claim.num_ranks != rendezvous_.num_ranks) {
      return fmt::format(
          "connect: group size differs: rank {} has num_ranks = {}, rank 0 has num_ranks = {}",
          claim.rank,
          claim.num_ranks,
          rendezvous_.num_ranks
      );
    }
    if (claim.rank < 0 || claim.rank >= rendezvous_.num_ranks) {
      return fmt::format(
          "connect: rank {} is out of range (num_ranks = {})", claim.rank, claim.num_ranks
      );
    }
    if (claim.rank == 0 || joined_[static_cast<size_t>(claim.rank)].is_open()) {
      return fmt::format(
          "connect: rank {} joined twice at {} (each rank needs its own number)", claim.rank, place_
      );
    }
    return {};
  }

  // Joined ranks are silent until they are welcome: anything to read is the end of one.
  void check_joined() {
    for (int rank = 1; rank < rendezvous_.num_ranks; ++rank) {
      Socket& socket = joined_[static_cast<size_t>(rank)];
      if (socket.is_open() && wait_readable(socket, Deadline(std::chrono::milliseconds(0)))) {
        socket.close();
        end({ErrorCode::kPeerFailed,
             fmt::format("connect: rank {} left before the group was complete", rank)},
            0);
      }
    }
  }

  // Tells those who joined, and for a while those who still come, until `num_others` know.
  [[noreturn]] void end(const Failure& failure, int num_others) {
    for (Socket& socket : joined_) {
      if (socket.is_open()) {
        send_failure(socket, failure);
        socket.close();
        --num_others;
      }
    }
    const Deadline deadline(rendezvous_.timeout / 10);
    while (true) {
      for (const Guest& guest : std::exchange(proven_, {})) {
        send_failure(guest.socket(), failure);
        --num_others;
      }
      if (num_others <= 0 || deadline.has_passed()) {
        break;
      }
      wait(deadline);
      sort_guests();
    }
    raise_error(failure.code, context_, failure.text);
  }

  const Rendezvous& rendezvous_;
  const Context context_;
  const std::string place_;
  const Point secret_;
  Socket listener_;
  std::vector<Guest> guests_;
  std::vector<Guest> proven_;   // to be admitted
  std::vector<Socket> joined_;  // by rank
  std::vector<int> other_secret_;
  uint64_t num_strangers_ = 0;
  std::vector<std::string> strangers_;  // hosts
  bool had_too_few_files_ = false;
};

// --- the other ranks' side ---

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kAttemptTime = std::chrono::seconds(5);
constexpr Milliseconds kFirstPause = Milliseconds(5);
constexpr Milliseconds kLongestPause = Milliseconds(200);

class Knock {
 public:
  explicit Knock(const Rendezvous& rendezvous)
      : rendezvous_(rendezvous),
        context_{rendezvous.rank, rendezvous.num_ranks, "tcp"},
        place_(endpoint_text(rendezvous.address, rendezvous.port)),
        secret_(point_of(rendezvous.secret)),
        endpoints_(resolve(rendezvous.address, rendezvous.port, context_)) {}

  Socket run() {
    const Deadline deadline(rendezvous_.timeout);
    for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
      for (const Endpoint& endpoint : endpoints_) {
        Socket socket = attempt(endpoint, Deadline(std::min(kAttemptTime, deadline.left())));
        if (socket.is_open()) {
          await_welcome(socket);
          return socket;
        }
      }
      WEFT_CHECK(
          context_,
          !deadline.has_passed(),
          ErrorCode::kTimeout,
          "connect: rank 0 did not answer at {} within {} ({}). Does it run, and is its group not "
          "complete already?",
          place_,
          seconds_text(rendezvous_.timeout),
          problem_
      );
      std::this_thread::sleep_for(std::min(pause, deadline.left()));
    }
  }

 private:
  // Not open if it is worth another try; then `problem_` says what went wrong.
  Socket attempt(const Endpoint& endpoint, const Deadline& deadline) {
    Socket socket = connect_to(endpoint, deadline);
    if (!socket.is_open()) {
      problem_ = std::strerror(errno);
      return {};
    }
    return shake_hands(socket, deadline) ? std::move(socket) : Socket();
  }

  bool shake_hands(const Socket& socket, const Deadline& deadline) {
    Handshake handshake(secret_, kPeer);
    Greeting greeting;
    if (!send(socket, handshake.greeting(), deadline) || !receive(socket, greeting, deadline) ||
        !handshake.hear(greeting)) {
      problem_ = "what listens there does not answer as this version of Weft does";
      return false;
    }
    const Claim claim = {kProtocolVersion, rendezvous_.rank, rendezvous_.num_ranks};
    Proof proof;
    if (!send(socket, Hello{claim, handshake.prove(kPeer, claim)}, deadline) ||
        !receive(socket, proof, deadline)) {
      problem_ = "it closed the connection";
      return false;
    }
    WEFT_CHECK_ARG(
        context_,
        handshake.is_proven(kRoot, claim, proof),
        "connect: rank 0 at {} holds another secret (it must be the same on every rank). If they "
        "are the same, another group uses this port",
        place_
    );
    return true;
  }

  template <class Message>
  static bool send(const Socket& socket, const Message& message, const Deadline& deadline) {
    const auto bytes = std::as_bytes(std::span(&message, 1));
    return send_all(socket, bytes, deadline) == IoState::kDone;
  }

  template <class Message>
  static bool receive(const Socket& socket, Message& message, const Deadline& deadline) {
    const auto bytes = std::as_writable_bytes(std::span(&message, 1));
    return receive_all(socket, bytes, deadline) == IoState::kDone;
  }

  // From here on rank 0 decides how long to wait for the others.
  void await_welcome(const Socket& socket) const {
    Frame frame;
    const Milliseconds time = patience(rendezvous_.timeout);
    const IoState state = receive_frame(socket, frame, Deadline(time));
    WEFT_CHECK(
        context_,
        state != IoState::kMore,
        ErrorCode::kTimeout,
        "connect: rank 0 at {} did not complete the group within {}",
        place_,
        seconds_text(time)
    );
    if (const std::optional<Failure> failure = failure_in(frame)) {
      raise_error(failure->code, context_, failure->text);
    }
    WEFT_CHECK(
        context_,
        state == IoState::kDone && frame.header.kind == FrameKind::kWelcome,
        ErrorCode::kPeerFailed,
        "connect: rank 0 at {} left before the group was complete",
        place_
    );
  }

  const Rendezvous& rendezvous_;
  const Context context_;
  const std::string place_;
  const Point secret_;
  const std::vector<Endpoint> endpoints_;
  std::string problem_;
};

}  // namespace

std::vector<Socket> admit_ranks(const Rendezvous& rendezvous, Socket listener) {
  return Admission(rendezvous, std::move(listener)).run();
}

Socket join_ranks(const Rendezvous& rendezvous) {
  return Knock(rendezvous).run();
}

}  // namespace weft
