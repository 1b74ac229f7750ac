// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/rendezvous.hpp"

#include <algorithm>
#include <optional>
#include <poll.h>
#include <string>
#include <thread>

#include "core/clock.hpp"
#include "group/control_plane.hpp"
#include "group/tcp/door.hpp"
#include "group/tcp/frame.hpp"
#include "group/tcp/socket.hpp"

namespace weft {
namespace {

// --- rank 0's side ---

// Most connections without a proof at a time.
constexpr size_t kMaxGuests = 1024;
// Idle sockets are checked this often.
constexpr auto kTick = std::chrono::milliseconds(250);

class Admission {
 public:
  Admission(const Rendezvous& rendezvous, Socket listener)
      : rendezvous_(rendezvous),
        context_{0, rendezvous.num_ranks, "tcp"},
        place_(endpoint_text(rendezvous.address, port_of(listener))),
        door_(std::move(listener), point_of(rendezvous.secret), kMaxGuests),
        joined_(static_cast<size_t>(rendezvous.num_ranks)) {}

  std::vector<Socket> run() {
    const Deadline deadline(rendezvous_.timeout);
    while (!missing().empty()) {
      if (deadline.has_passed()) {
        end({ErrorCode::kTimeout, missing_text()}, 0);
      }
      wait(deadline);
      if (door_.is_stuck()) {
        end({ErrorCode::kNotAvailable, "connect: cannot accept a connection. " + files_text()}, 0);
      }
      while (!proven_.empty()) {
        Guest guest = std::move(proven_.back());
        proven_.pop_back();
        admit(guest);
      }
      check_joined();
    }
    door_.show_out_all();  // their files are free for what ranks open now
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
    const Door::Strangers& strangers = door_.strangers();
    if (!strangers.other_secret.empty()) {
      text += fmt::format(
          " (a connection that calls itself {} proved another secret)",
          rank_list(strangers.other_secret)
      );
    }
    if (strangers.number > 0) {
      text += fmt::format(
          " ({} connections proved nothing, of {}{})",
          strangers.number,
          fmt::join(strangers.hosts, ", "),
          strangers.hosts.size() == Door::kMostNotes ? " and perhaps others" : ""
      );
    }
    if (strangers.had_too_few_files) {
      text += fmt::format(" ({})", files_text());
    }
    return text;
  }

  // Sleeps until something happens, then accepts some new connections and reads all.
  void wait(const Deadline& deadline) {
    std::vector<pollfd> entries = door_.wanted();
    for (const Socket& socket : joined_) {
      entries.push_back({socket.get(), POLLIN, 0});  // a closed place is skipped by poll()
    }
    const auto time = std::min<std::chrono::milliseconds>(deadline.left(), kTick);
    poll(entries.data(), entries.size(), static_cast<int>(time.count()));
    std::ranges::move(door_.let_in(), std::back_inserter(proven_));
  }

  [[nodiscard]] static std::string files_text() {
    return "Rank 0 may open too few files; raise the limit (ulimit -n)";
  }

  void admit(Guest& guest) {
    if (std::string text = conflict(guest.claim()); !text.empty()) {
      const Failure failure = {ErrorCode::kInvalidArgument, std::move(text)};
      const int num_ranks = std::max(rendezvous_.num_ranks, guest.claim().num_ranks);
      send_failure(guest.socket(), failure);
      end(failure, num_ranks - 2);  // without rank 0 and the rank just told
    }
    joined_[static_cast<size_t>(guest.claim().rank)] = guest.take_socket();
  }

  // Returns why a proven connection cannot join; empty: it can.
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

  // Ends the group if a joined rank has left: until welcome, ranks send nothing but their end.
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

  // Tells the ranks that joined, and for a while those that still come, until `num_others` know.
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
    }
    raise_error(failure.code, context_, failure.text);
  }

  const Rendezvous& rendezvous_;
  const Context context_;
  const std::string place_;
  Door door_;
  std::vector<Guest> proven_;   // to be admitted
  std::vector<Socket> joined_;  // by rank
};

// --- the other ranks' side ---

using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kFirstPause = Milliseconds(5);
constexpr Milliseconds kLongestPause = Milliseconds(200);

class Joining {
 public:
  explicit Joining(const Rendezvous& rendezvous)
      : rendezvous_(rendezvous),
        context_{rendezvous.rank, rendezvous.num_ranks, "tcp"},
        place_(endpoint_text(rendezvous.address, rendezvous.port)),
        secret_(point_of(rendezvous.secret)),
        endpoints_(resolve(rendezvous.address, rendezvous.port, context_)) {}

  Socket run() {
    const Deadline deadline(rendezvous_.timeout);
    for (Milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
      for (const Endpoint& endpoint : endpoints_) {
        Socket socket = attempt(endpoint, Deadline(std::min(kHandshakeTime, deadline.left())));
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
  // Tries to connect. The socket is not open if another try may help; `problem_` then says why.
  Socket attempt(const Endpoint& endpoint, const Deadline& deadline) {
    const Claim claim = {kProtocolVersion, rendezvous_.rank, rendezvous_.num_ranks};
    Knock knock(endpoint, secret_, claim, deadline);
    const TalkState state = knock.finish();
    WEFT_CHECK_ARG(
        context_,
        state != TalkState::kOtherSecret,
        "connect: rank 0 at {} holds another secret (it must be the same on every rank). If they "
        "are the same, another group uses this port",
        place_
    );
    problem_ = knock.problem();
    return state == TalkState::kProven ? knock.take_socket() : Socket();
  }

  // Waits for rank 0, which from here on decides how long to wait for the others.
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
  return Joining(rendezvous).run();
}

}  // namespace weft
