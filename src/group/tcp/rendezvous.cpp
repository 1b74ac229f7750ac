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
  explicit Guest(Socket socket) : socket_(std::move(socket)) {}

  // Takes what has arrived, without waiting.
  [[nodiscard]] GuestState advance(const Key& key) {
    IoState state = is_challenged_ ? IoState::kDone : take_greeting(key);
    if (state == IoState::kDone) {
      state = take(hello_);
    }
    switch (state) {
      case IoState::kDone:
        return is_proven(key, greeting_, challenge_, hello_) ? GuestState::kProven
                                                             : GuestState::kOtherSecret;
      case IoState::kMore:
        return deadline_.has_passed() ? GuestState::kGone : GuestState::kWaiting;
      case IoState::kClosed:
        break;
    }
    return GuestState::kGone;
  }

  [[nodiscard]] const Socket& socket() const { return socket_; }
  [[nodiscard]] Socket take_socket() { return std::move(socket_); }
  // True only of a proven guest.
  [[nodiscard]] const Claim& claim() const { return hello_.claim; }

 private:
  // Honest ranks answer at once.
  static constexpr auto kTime = std::chrono::seconds(5);

  template <class Message>
  [[nodiscard]] IoState take(Message& message) {
    return receive_some(socket_, std::as_writable_bytes(std::span(&message, 1)), done_);
  }

  [[nodiscard]] IoState take_greeting(const Key& key) {
    const IoState state = take(greeting_);
    if (state != IoState::kDone) {
      return state;
    }
    if (greeting_.magic != kMagic) {
      return IoState::kClosed;
    }
    challenge_ = make_challenge(key, greeting_);
    is_challenged_ = true;
    done_ = 0;
    // So few bytes fit the empty buffer of a fresh connection: no wait.
    const Deadline now(std::chrono::milliseconds(0));
    return send_all(socket_, std::as_bytes(std::span(&challenge_, 1)), now);
  }

  Socket socket_;
  Deadline deadline_{kTime};
  size_t done_ = 0;  // bytes of the message being received
  bool is_challenged_ = false;
  Greeting greeting_;
  Challenge challenge_;
  Hello hello_;
};

// Strangers can hold no more places than this; the longest waiting goes first.
constexpr size_t kMaxGuests = 1024;
constexpr size_t kMaxNotes = 4;
// Slow guests are looked at this often.
constexpr auto kTick = std::chrono::milliseconds(250);

class Admission {
 public:
  Admission(const Rendezvous& rendezvous, Socket listener)
      : rendezvous_(rendezvous),
        context_{0, rendezvous.num_ranks, "tcp"},
        place_(endpoint_text(rendezvous.address, port_of(listener))),
        key_(derive_key(rendezvous.secret)),
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
    if (had_too_few_files_) {
      text += fmt::format(" ({})", files_text());
    }
    return text;
  }

  // Sleeps until something happens, then lets new guests in.
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
    for (Socket socket = accept_next(); socket.is_open(); socket = accept_next()) {
      if (guests_.size() == kMaxGuests) {
        guests_.erase(guests_.begin());
      }
      guests_.emplace_back(std::move(socket));
    }
  }

  // Where no file is left for it, the guest who has waited longest gives up his.
  Socket accept_next() {
    Socket socket = accept_from(listener_);
    while (!socket.is_open() && (errno == EMFILE || errno == ENFILE)) {
      had_too_few_files_ = true;
      if (guests_.empty()) {
        break;
      }
      guests_.erase(guests_.begin());
      socket = accept_from(listener_);
    }
    return socket;
  }

  [[nodiscard]] static std::string files_text() {
    return "Rank 0 may open too few files; raise the limit (ulimit -n)";
  }

  void sort_guests() {
    std::vector<Guest> waiting;
    for (Guest& guest : guests_) {
      switch (guest.advance(key_)) {
        case GuestState::kProven:
          proven_.push_back(std::move(guest));
          break;
        case GuestState::kWaiting:
          waiting.push_back(std::move(guest));
          break;
        case GuestState::kOtherSecret:
          note_other_secret(guest.claim().rank);
          break;
        case GuestState::kGone:
          break;
      }
    }
    guests_ = std::move(waiting);
  }

  void note_other_secret(int rank) {
    const bool is_known = std::ranges::find(other_secret_, rank) != other_secret_.end();
    if (!is_known && other_secret_.size() < kMaxNotes) {
      other_secret_.push_back(rank);
    }
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
  const Key key_;
  Socket listener_;
  std::vector<Guest> guests_;
  std::vector<Guest> proven_;   // to be admitted
  std::vector<Socket> joined_;  // by rank
  std::vector<int> other_secret_;
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
        key_(derive_key(rendezvous.secret)),
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
    Greeting greeting;
    greeting.nonce = random_nonce();
    const std::optional<Challenge> challenge = greet(socket, greeting, deadline);
    if (!challenge) {
      problem_ = "what listens there does not answer as Weft does";
      return {};
    }
    return answer(socket, greeting, *challenge, deadline) ? std::move(socket) : Socket();
  }

  static std::optional<Challenge> greet(
      const Socket& socket, const Greeting& greeting, const Deadline& deadline
  ) {
    Challenge challenge;
    const bool is_answered =
        send_all(socket, std::as_bytes(std::span(&greeting, 1)), deadline) == IoState::kDone &&
        receive_all(socket, std::as_writable_bytes(std::span(&challenge, 1)), deadline) ==
            IoState::kDone;
    return is_answered && challenge.magic == kMagic ? std::optional(challenge) : std::nullopt;
  }

  bool answer(
      const Socket& socket,
      const Greeting& greeting,
      const Challenge& challenge,
      const Deadline& deadline
  ) {
    const Claim claim = {kProtocolVersion, rendezvous_.rank, rendezvous_.num_ranks};
    const bool is_same_secret = is_proven(key_, greeting, challenge);
    // Without proof there is none in return: rank 0 only learns who has another secret.
    const Hello hello =
        is_same_secret ? make_hello(key_, greeting, challenge, claim) : Hello{claim, {}};
    const IoState state = send_all(socket, std::as_bytes(std::span(&hello, 1)), deadline);
    WEFT_CHECK_ARG(
        context_,
        is_same_secret,
        "connect: rank 0 at {} holds another secret (it must be the same on every rank). If they "
        "are the same, another group uses this port",
        place_
    );
    problem_ = "it closed the connection";
    return state == IoState::kDone;
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
  const Key key_;
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
