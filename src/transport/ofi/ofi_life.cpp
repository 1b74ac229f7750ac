// SPDX-License-Identifier: Apache-2.0
// Life: who is there, and leaving.
#include <algorithm>
#include <rdma/fi_errno.h>
#include <thread>
#include <utility>

#include "transport/checks.hpp"
#include "transport/ofi/knock.hpp"
#include "transport/ofi/ofi_transport.hpp"

namespace weft::ofi {
namespace {

// A peer that is stopped shall not hold a leaving rank up for longer.
constexpr auto kClosePatience = std::chrono::seconds(2);

// On a network: a rank that the fabric takes nothing for, not even a connection, for so long is
// gone. A guess; connecting takes milliseconds.
constexpr auto kLongSilence = std::chrono::seconds(5);

// A local provider's address is a text like "fi_shm://" and the name of its file.
std::string file_of(const Bytes& address) {
  const std::string_view text(reinterpret_cast<const char*>(address.data()), address.size());
  const size_t slashes = text.find("//");
  if (slashes == std::string_view::npos) {
    return {};
  }
  const std::string_view name = text.substr(slashes + 2);
  return fmt::format("/dev/shm/{}", name.substr(0, name.find('\0')));
}

}  // namespace

// One try: who asks for a state asks again.
void OfiTransport::ping(int rank) const {
  Queue& queue = *queues_.front();
  if (queue.num_flying_to(rank) > 0) {
    return;  // its fate tells as much
  }
  const Message text = message(MessageKind::kPing);
  Queue::Operation* const operation = queue.start(rank, sizeof text);
  if (operation == nullptr) {
    return;
  }
  const int64_t result = queue.post(*operation, text);
  if (result == 0) {
    peers_->note_answered(rank);
    return;
  }
  queue.abandon(*operation);
  if (result != -FI_EAGAIN) {
    peers_->on_failure(rank, "fi_sendmsg", static_cast<int>(-result), fabric_->name());
    return;
  }
  // Some providers try to connect again and again, and never say that nobody is there.
  if (peers_->note_unanswered(rank) > kLongSilence) {
    peers_->on_lost(rank);
  }
  knock_at(rank);
}

// On IP there is a quicker way to find out.
void OfiTransport::knock_at(int rank) const {
  if (fabric_->provider().takes_address && peers_->needs_ping(rank) &&
      is_refused(addresses_[static_cast<size_t>(rank)].front())) {
    peers_->on_lost(rank);
  }
}

PeerState OfiTransport::peer_state(int rank) const {
  check_rank(context_, "peer_state", rank);
  if (!is_far(rank)) {
    return near_->peer_state(rank);
  }
  if (peers_->has_left(rank)) {
    return PeerState::kLeft;
  }
  if (!peers_->has_died(rank)) {
    if (peers_->needs_ping(rank) && !is_closed_) {
      ping(rank);
    }
    return PeerState::kAlive;
  }
  poll_until_quiet();  // it may have said farewell before it ended
  if (peers_->has_left(rank)) {
    return PeerState::kLeft;
  }
  remove_files_of(rank);
  return PeerState::kDied;
}

// Again: no effect.
void OfiTransport::remove_files_of(int rank) const {
  if (!fabric_->provider().is_local) {
    return;
  }
  for (const Bytes& address : addresses_[static_cast<size_t>(rank)]) {
    static_cast<void>(::unlink(file_of(address).c_str()));
  }
}

void OfiTransport::close() {
  if (std::exchange(is_closed_, true)) {
    return;
  }
  near_->close();  // nothing is under way there
  const Clock::time_point deadline =
      Clock::now() + std::min<Clock::duration>(kClosePatience, timeout_);
  const auto finish_flying = [&] {
    const auto is_flying = [&](const auto& queue) {
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (queue->num_flying_to(rank) > 0 && !peers_->is_gone(rank)) {
          return true;
        }
      }
      return false;
    };
    for (int round = 0; Clock::now() < deadline; ++round) {
      if (std::none_of(queues_.begin(), queues_.end(), is_flying)) {
        return;
      }
      poll_until_quiet();
      std::this_thread::sleep_for(std::chrono::microseconds(round < 10 ? 1 : 50));
    }
  };
  // A farewell is sent when all before it has been delivered, so that it is the last that comes.
  finish_flying();
  const Message farewell = message(MessageKind::kLeft);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (const auto& queue : queues_) {
      if (is_far(rank) && !peers_->is_gone(rank)) {
        static_cast<void>(send(*queue, rank, farewell, deadline));
      }
    }
  }
  finish_flying();
}

OfiTransport::~OfiTransport() {
  close();
  threads_.clear();
  local_.reset();
  if (closing_ != nullptr) {
    closing_->keep(std::move(queues_));
  }
}

}  // namespace weft::ofi
