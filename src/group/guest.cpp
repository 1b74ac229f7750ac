// SPDX-License-Identifier: Apache-2.0
#include "group/guest.hpp"

namespace weft {
namespace {

template <class Message>
IoState take(const Socket& socket, Message& message, size_t& done) {
  return receive_some(socket, std::as_writable_bytes(std::span(&message, 1)), done);
}

}  // namespace

IoState Guest::take_greeting(const Key& key) {
  const IoState state = take(socket_, greeting_, done_);
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
  return send_all(
      socket_, std::as_bytes(std::span(&challenge_, 1)), Deadline(std::chrono::milliseconds(0))
  );
}

GuestState Guest::advance(const Key& key) {
  IoState state = is_challenged_ ? IoState::kDone : take_greeting(key);
  if (state == IoState::kDone) {
    state = take(socket_, hello_, done_);
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

}  // namespace weft
