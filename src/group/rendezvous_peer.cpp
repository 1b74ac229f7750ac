// SPDX-License-Identifier: Apache-2.0
// The other ranks' side of the rendezvous.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "group/frame.hpp"
#include "group/handshake.hpp"
#include "group/rendezvous.hpp"

namespace weft {
namespace {

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

Socket join_ranks(const Rendezvous& rendezvous) {
  return Knock(rendezvous).run();
}

}  // namespace weft
