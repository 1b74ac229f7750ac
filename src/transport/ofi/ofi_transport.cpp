// SPDX-License-Identifier: Apache-2.0
#include "transport/ofi/ofi_transport.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <rdma/fi_errno.h>
#include <thread>
#include <utility>

#include "group/tcp/socket.hpp"
#include "transport/common.hpp"
#include "transport/ofi/peers.hpp"

namespace weft::ofi {
namespace {

// Peers are told of a release as a courtesy; one that is stopped must not hold this rank up for
// longer.
constexpr auto kReleasePatience = std::chrono::seconds(1);

// A peer that is stopped must not hold a leaving rank up for longer.
constexpr auto kClosePatience = std::chrono::seconds(2);

// On a network: a rank that the fabric takes nothing for any more, not even a connection, for so
// long is gone. A guess; connecting takes milliseconds.
constexpr auto kLongSilence = std::chrono::seconds(5);

// Returns the file that a local provider's address names, a text like "fi_shm://" and the file.
std::string file_of(const Bytes& address) {
  const std::string_view text(reinterpret_cast<const char*>(address.data()), address.size());
  const size_t slashes = text.find("//");
  if (slashes == std::string_view::npos) {
    return {};
  }
  const std::string_view name = text.substr(slashes + 2);
  return fmt::format("/dev/shm/{}", name.substr(0, name.find('\0')));
}

// True if the host of this socket address answers that no process listens there. False if one does,
// or if no answer comes in some milliseconds. Opens a connection and drops it at once.
bool is_refused(const Bytes& address) {
  sockaddr_storage place = {};
  if (address.size() < sizeof(sa_family_t) || address.size() > sizeof place) {
    return false;
  }
  std::memcpy(&place, address.data(), address.size());
  if (place.ss_family != AF_INET && place.ss_family != AF_INET6) {
    return false;
  }
  const Endpoint endpoint = {place, static_cast<socklen_t>(address.size())};
  constexpr auto kPatience = std::chrono::milliseconds(20);
  return !connect_to(endpoint, Deadline(kPatience)).is_open() && errno == ECONNREFUSED;
}

}  // namespace

Message OfiTransport::message(MessageKind kind, uint64_t a, uint64_t b) const {
  return {
      .kind = kind,
      .from = static_cast<uint32_t>(context_.rank),
      .session = session_,
      .a = a,
      .b = b};
}

// --- what the queues find out ---

void OfiTransport::on_put(uint64_t data) {
  const uint32_t signal = immediate_->signal(data);
  if (signal < num_signals_) {
    own_.raise(signal, immediate_->amount(data));
    note_news();
  }
}

void OfiTransport::on_message(const Message& message) {
  const auto from = static_cast<int>(message.from);
  if (message.session != session_ || from < 0 || from >= context_.num_ranks) {
    return;  // from no rank of ours
  }
  switch (message.kind) {
    case MessageKind::kRaise:
      if (message.a < num_signals_) {
        own_.raise(static_cast<uint32_t>(message.a), message.b);
        note_news();
      }
      return;
    case MessageKind::kReleased:
      remote_[message.from]->release(
          static_cast<uint32_t>(message.a), static_cast<uint32_t>(message.b)
      );
      return;
    case MessageKind::kLeft:
      if (message.a > 0 && std::cmp_less_equal(message.a, context_.num_ranks)) {
        hear_of_death(static_cast<int>(message.a) - 1);
      }
      peers_->on_left(from);
      note_news();
      return;
    case MessageKind::kPing:
      return;
  }
}

void OfiTransport::on_failure(int rank, const char* call, int error) {
  peers_->on_failure(rank < 0 ? context_.rank : rank, call, error, fabric_->name());
  note_news();
}

void OfiTransport::on_batch_end() {
  if (has_news_.exchange(false, std::memory_order_acquire)) {
    own_.ring();  // after what it announces
  }
}

// --- memory ---

Region OfiTransport::with_fabric(Region region, std::optional<Device> lent_from) {
  try {
    local_->add(region, lent_from);
  } catch (...) {
    neighbours_->release(region.ref);
    throw;
  }
  return region;
}

Region OfiTransport::lend(std::byte* data, uint64_t bytes, const Device& device) {
  const std::string obstacle = lend_obstacle(device);
  WEFT_CHECK(context_, obstacle.empty(), ErrorCode::kNotAvailable, "lend: {}", obstacle);
  return with_fabric(neighbours_->add_lent(data, bytes), device);
}

std::string OfiTransport::lend_obstacle(const Device& device) const {
  return device.kind == Device::Kind::kCpu ? std::string() : fabric_->gpu_memory_obstacle();
}

void OfiTransport::release(const RegionRef& region) {
  if (!own_.is_here()) {
    return;
  }
  local_->remove(region);
  neighbours_->release(region);  // throws for what is not allocated
  const Message released = message(MessageKind::kReleased, region.slot, region.generation);
  Queue& queue = *queues_.front();
  const Clock::time_point deadline = Clock::now() + kReleasePatience;
  const auto pending = std::make_shared<std::atomic<uint32_t>>(0);
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (is_remote(rank) && !peers_->is_gone(rank)) {
      static_cast<void>(send({queue, rank}, released, deadline, pending));
    }
  }
  while (pending->load(std::memory_order_acquire) > 0 && Clock::now() < deadline) {
    if (queue.poll() == 0) {
      std::this_thread::yield();
    }
  }
}

// Handles the messages that have been delivered here.
void OfiTransport::poll_until_quiet() const {
  constexpr int kMostRounds = 1000;
  for (const auto& queue : queues_) {
    for (int round = 0; round < kMostRounds && queue->poll() > 0; ++round) {
    }
  }
}

void OfiTransport::import(int rank, const RegionRef& region) {
  check_rank(context_, "import", rank);
  if (!is_remote(rank)) {
    neighbours_->import(rank, region);
    return;
  }
  poll_until_quiet();  // which brings word of releases
  check_importable(context_, rank, region, remote_[static_cast<size_t>(rank)]->insert(region));
}

std::byte* OfiTransport::mapped(int rank, uint32_t region) const {
  check_rank(context_, "mapped", rank);
  return is_remote(rank) || !shares_memory_ ? nullptr : neighbours_->mapped(rank, region);
}

// --- waiting ---

void OfiTransport::throw_failure() const {
  if (const auto failure = peers_->any_failure()) {
    raise_error(ErrorCode::kTransport, context_, *failure);
  }
}

void OfiTransport::progress() {
  throw_failure();
  neighbours_->progress();
  for (const auto& queue : queues_) {
    queue->try_poll();
  }
}

void OfiTransport::park(uint32_t seen, std::chrono::nanoseconds at_most) {
  throw_failure();
  const auto has_moved = [&] { return own_.doorbell() != seen; };
  const auto left = spin_until(spin_, at_most, has_moved, [this](size_t look) {
    queues_[look % queues_.size()]->try_poll();
    std::this_thread::yield();
  });
  if (left.count() <= 0) {
    return;
  }
  for (const auto& thread : threads_) {
    thread->add_sleeper();
  }
  own_.sleep(seen, left);
  for (const auto& thread : threads_) {
    thread->remove_sleeper();
  }
}

// --- life: who is there, and leaving ---

// Notes a death, which not every rank can see at once: a rank that leaves for it tells the others.
void OfiTransport::hear_of_death(int rank) const {
  if (rank >= 0 && is_remote(rank)) {
    peers_->on_lost(rank);
  }
}

void OfiTransport::hear_neighbours() const {
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (!is_remote(rank)) {
      hear_of_death(neighbours_->death_told_by(rank));
    }
  }
}

// Returns a rank that is known to have died; -1: none.
int OfiTransport::find_dead() const {
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    const bool has_died = is_remote(rank) ? peers_->has_died(rank) && !peers_->has_left(rank)
                                          : neighbours_->peer_state(rank) == PeerState::kDied;
    if (has_died) {
      return rank;
    }
  }
  return -1;
}

// Tries once: callers that ask for a rank's state ask again.
void OfiTransport::ping(int rank) const {
  Queue& queue = *queues_.front();
  if (queue.num_flying_to(rank) > 0) {
    return;  // that operation's fate tells as much
  }
  const int64_t result = noted(rank, queue.send(rank, message(MessageKind::kPing)));
  if (result == 0 || result == Queue::kNoRoom) {
    return;
  }
  if (result != -FI_EAGAIN) {
    peers_->on_failure(rank, "fi_sendmsg", static_cast<int>(-result), fabric_->name());
    return;
  }
  note_silence(rank);
  knock_at(rank);
}

// Takes a long silence for a death: some providers try to connect again and again, without a word.
void OfiTransport::note_silence(int rank) const {
  if (peers_->needs_ping(rank) && peers_->note_unanswered(rank) > kLongSilence) {
    peers_->on_lost(rank);
  }
}

// On IP, takes a port that is closed for a death, which is quicker.
void OfiTransport::knock_at(int rank) const {
  if (fabric_->provider().takes_address && peers_->needs_ping(rank) &&
      is_refused(addresses_[static_cast<size_t>(rank)].front())) {
    peers_->on_lost(rank);
  }
}

PeerState OfiTransport::peer_state(int rank) const {
  check_rank(context_, "peer_state", rank);
  if (!is_remote(rank)) {
    return neighbours_->peer_state(rank);
  }
  if (peers_->has_left(rank)) {
    return PeerState::kLeft;
  }
  hear_neighbours();
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

// Removes a local provider's files of the rank; a second call has no effect.
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
  const int dead = find_dead();
  neighbours_->leave(dead);  // nothing is under way there
  const Clock::time_point deadline =
      Clock::now() + std::min<Clock::duration>(kClosePatience, timeout_);
  const auto finish_flying = [&] {
    const auto is_flying = [&](const auto& queue) {
      for (int rank = 0; rank < context_.num_ranks; ++rank) {
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
  const Message farewell = message(MessageKind::kLeft, static_cast<uint64_t>(dead + 1));
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    for (const auto& queue : queues_) {
      if (is_remote(rank) && !peers_->is_gone(rank)) {
        static_cast<void>(send({*queue, rank}, farewell, deadline));
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
