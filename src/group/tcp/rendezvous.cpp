// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of the rendezvous.
#include <algorithm>
#include <cerrno>
#include <optional>
#include <poll.h>
#include <string>

#include "group/frame.hpp"
#include "group/guest.hpp"
#include "group/rank_list.hpp"
#include "group/rendezvous.hpp"

namespace weft {
namespace {

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
    std::vector<pollfd> entries = {{listener_.fd(), POLLIN, 0}};
    for (const Guest& guest : guests_) {
      entries.push_back({guest.socket().fd(), POLLIN, 0});
    }
    for (const Socket& socket : joined_) {
      entries.push_back({socket.fd(), POLLIN, 0});  // a closed place is skipped by poll()
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
    if (const std::optional<Failure> failure = conflict(guest.claim())) {
      const int num_ranks = std::max(rendezvous_.num_ranks, guest.claim().num_ranks);
      send_failure(guest.socket(), *failure);
      end(*failure, num_ranks - 2);  // without rank 0 and the guest
    }
    joined_[static_cast<size_t>(guest.claim().rank)] = guest.take_socket();
  }

  [[nodiscard]] std::optional<Failure> conflict(const Claim& claim) const {
    const auto failure = [](std::string text) {
      return Failure{ErrorCode::kInvalidArgument, std::move(text)};
    };
    if (claim.version != kProtocolVersion) {
      return failure(fmt::format(
          "connect: rank {} speaks version {} (rank 0: {}). Run the same Weft on all ranks",
          claim.rank,
          claim.version,
          kProtocolVersion
      ));
    }
    if (claim.num_ranks != rendezvous_.num_ranks) {
      return failure(fmt::format(
          "connect: group size differs: rank {} has num_ranks = {}, rank 0 has num_ranks = {}",
          claim.rank,
          claim.num_ranks,
          rendezvous_.num_ranks
      ));
    }
    if (claim.rank < 0 || claim.rank >= rendezvous_.num_ranks) {
      return failure(fmt::format(
          "connect: rank {} is out of range (num_ranks = {})", claim.rank, claim.num_ranks
      ));
    }
    if (claim.rank == 0 || joined_[static_cast<size_t>(claim.rank)].is_open()) {
      return failure(fmt::format(
          "connect: rank {} joined twice at {} (each rank needs its own number)", claim.rank, place_
      ));
    }
    return std::nullopt;
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

}  // namespace

std::vector<Socket> admit_ranks(const Rendezvous& rendezvous, Socket listener) {
  return Admission(rendezvous, std::move(listener)).run();
}

}  // namespace weft
