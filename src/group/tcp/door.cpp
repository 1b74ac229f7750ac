// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/door.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr auto kPeer = Handshake::Side::kPeer;
constexpr auto kRoot = Handshake::Side::kRoot;

template <class Message>
IoState take(const Socket& socket, Message& message, size_t& done) {
  return receive_some(socket, std::as_writable_bytes(std::span(&message, 1)), done);
}

// Sends without a wait, as so few bytes fit a fresh connection's buffer. Reading finds a failure.
template <class Message>
void send(const Socket& socket, const Message& message) {
  const Deadline now(std::chrono::milliseconds(0));
  static_cast<void>(send_all(socket, value_bytes(message), now));
}

template <class Value>
void note(std::vector<Value>& notes, const Value& value) {
  if (std::ranges::find(notes, value) == notes.end() && notes.size() < Door::kMostNotes) {
    notes.push_back(value);
  }
}

}  // namespace

Knock::Knock(
    const Endpoint& endpoint, const Point& secret, const Claim& claim, const Deadline& deadline
)
    : endpoint_(endpoint),
      secret_(secret),
      claim_(claim),
      deadline_(deadline),
      socket_(begin_connect(endpoint)),
      error_(socket_.is_open() ? 0 : errno) {}

TalkState Knock::fail(std::string problem) {
  problem_ = std::move(problem);
  socket_.close();
  return TalkState::kGone;
}

TalkState Knock::wait(IoState state, std::string problem) {
  const bool may_go_on = state == IoState::kMore && !deadline_.has_passed();
  return may_go_on ? TalkState::kWaiting : fail(std::move(problem));
}

TalkState Knock::advance() {
  if (!socket_.is_open()) {
    return fail(std::strerror(error_));
  }
  if (!handshake_) {
    const IoState state = finish_connect(socket_, endpoint_);
    if (state != IoState::kDone) {
      return wait(state, std::strerror(state == IoState::kMore ? ETIMEDOUT : errno));
    }
    handshake_.emplace(secret_, kPeer);
    send(socket_, handshake_->greeting());
  }
  if (!has_heard_) {
    IoState state = take(socket_, greeting_, done_);
    if (state == IoState::kDone && !handshake_->hear(greeting_)) {
      state = IoState::kClosed;
    }
    if (state != IoState::kDone) {
      return wait(state, "what listens there does not answer as this version of Weft does");
    }
    has_heard_ = true;
    done_ = 0;
    send(socket_, Hello{claim_, handshake_->prove(kPeer, claim_)});
  }
  if (const IoState state = take(socket_, proof_, done_); state != IoState::kDone) {
    return wait(state, "it closed the connection");
  }
  return handshake_->is_proven(kRoot, claim_, proof_) ? TalkState::kProven
                                                      : TalkState::kOtherSecret;
}

TalkState Knock::finish() {
  for (;;) {
    if (const TalkState state = advance(); state != TalkState::kWaiting) {
      return state;
    }
    pollfd entry = wanted();
    ::poll(&entry, 1, static_cast<int>(deadline_.left().count()));
  }
}

pollfd Knock::wanted() const {
  const int events = has_connected() ? POLLIN : POLLOUT;
  return {.fd = socket_.get(), .events = static_cast<short>(events), .revents = 0};
}

TalkState Guest::advance(const Point& secret) {
  IoState state = handshake_ ? IoState::kDone : take_greeting(secret);
  if (state == IoState::kDone) {
    state = take(socket_, hello_, done_);
  }
  if (state != IoState::kDone) {
    const bool may_go_on = state == IoState::kMore && !deadline_.has_passed();
    return may_go_on ? TalkState::kWaiting : TalkState::kGone;
  }
  const bool is_proven = handshake_->is_proven(kPeer, hello_.claim, hello_.proof);
  send(socket_, is_proven ? handshake_->prove(kRoot, hello_.claim) : Proof{});
  return is_proven ? TalkState::kProven : TalkState::kOtherSecret;
}

IoState Guest::take_greeting(const Point& secret) {
  const IoState state = take(socket_, greeting_, done_);
  if (state != IoState::kDone) {
    return state;
  }
  Handshake handshake(secret, kRoot);
  if (!handshake.hear(greeting_)) {
    return IoState::kClosed;
  }
  send(socket_, handshake.greeting());
  handshake_ = handshake;
  done_ = 0;
  return state;
}

Door::Door(Socket listener, const Point& secret, size_t most)
    : listener_(std::move(listener)), secret_(secret), most_(most) {}

std::vector<pollfd> Door::wanted() const {
  std::vector<pollfd> entries;
  if (!has_no_room_) {
    entries.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
  }
  for (const Guest& guest : guests_) {
    entries.push_back({.fd = guest.socket().get(), .events = POLLIN, .revents = 0});
  }
  return entries;
}

std::vector<Guest> Door::let_in() {
  has_no_room_ = false;
  // Accepts so few before all are read that earlier connections are read before the last of them.
  for (size_t i = 0; i < std::max<size_t>(most_ / 16, 1) && accept_one(); ++i) {
  }
  std::vector<Guest> proven;
  std::vector<Guest> waiting;
  for (Guest& guest : guests_) {
    switch (guest.advance(secret_)) {
      case TalkState::kProven:
        proven.push_back(std::move(guest));
        break;
      case TalkState::kWaiting:
        waiting.push_back(std::move(guest));
        break;
      case TalkState::kOtherSecret:
        note(strangers_.other_secret, guest.claim().rank);
        break;
      case TalkState::kGone:
        note_stranger(guest);
        break;
    }
  }
  guests_ = std::move(waiting);
  return proven;
}

bool Door::accept_one() {
  std::string host;
  Socket socket = accept_from(listener_, host);
  while (!socket.is_open() && (errno == EMFILE || errno == ENFILE)) {
    strangers_.had_too_few_files = true;
    has_no_room_ = guests_.empty();
    if (has_no_room_) {
      return false;
    }
    show_out_one();
    socket = accept_from(listener_, host);
  }
  if (!socket.is_open()) {
    has_no_room_ = errno == ENOBUFS || errno == ENOMEM;
    return false;
  }
  if (guests_.size() == most_) {
    show_out_one();
  }
  guests_.emplace_back(std::move(socket), std::move(host));
  return true;
}

// Drops the connection that has waited longest, of those without a greeting if there are any.
void Door::show_out_one() {
  const auto silent = std::ranges::find_if_not(guests_, &Guest::has_greeted);
  const auto one = silent == guests_.end() ? guests_.begin() : silent;
  note_stranger(*one);
  guests_.erase(one);
}

void Door::note_stranger(const Guest& guest) {
  ++strangers_.number;
  note(strangers_.hosts, guest.host());
}

}  // namespace weft
