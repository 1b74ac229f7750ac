// SPDX-License-Identifier: Apache-2.0
// The peers' side of PeerRegions, a service thread: it makes this rank's table agree with the
// boards of its peers, and frees what this rank has released once the peers have unmapped it.
// peer_regions.cpp has the owner's side.
#include <exception>
#include <utility>

#include "core/check.hpp"
#include "core/log.hpp"
#include "cuda/transport/peer_regions.hpp"

namespace weft {
namespace {

constexpr auto kPatience =
    std::chrono::milliseconds(50);  // a peer that died raises nothing; a guess

}  // namespace

void PeerRegions::run() {
  set_log_rank(rank_, num_ranks_);
  try {
    source_.enter_thread();
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: {}", error.what());
  }
  while (!is_stopped_.load(std::memory_order_acquire)) {
    const uint32_t seen = transport_->doorbell();
    try {
      serve();
    } catch (const std::exception& error) {
      log(LogLevel::kWarn, "peer memory: {}", error.what());
    }
    if (!is_stopped_.load(std::memory_order_acquire)) {
      transport_->park(seen, kPatience);
    }
  }
}

// New regions first: letting go of old ones may wait for running kernels.
void PeerRegions::serve() {
  std::vector<int> changed;
  for (int owner = 0; owner < num_ranks_; ++owner) {
    const auto i = static_cast<size_t>(owner);
    const uint64_t num_changes = boards_[i].head().num_changes.load(std::memory_order_acquire);
    if (is_peer(owner) && num_changes != std::exchange(seen_changes_[i], num_changes)) {
      changed.push_back(owner);
    }
  }
  for (const bool live : {true, false}) {
    for (const int owner : changed) {
      follow(owner, live);
    }
  }
  free_dead();
}

void PeerRegions::follow(int owner, bool live) {
  const Board& board = boards_[static_cast<size_t>(owner)];
  for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
    const uint64_t stamp = board.entry(region).stamp.load(std::memory_order_acquire);
    const bool is_new = stamp != mapped_[static_cast<size_t>(owner)][region].stamp;
    if (!is_new || is_live_stamp(stamp) != live) {
      continue;
    }
    try {
      follow(owner, region, stamp);
    } catch (const std::exception& error) {
      log(LogLevel::kWarn, "peer memory: region {} of rank {}: {}", region, owner, error.what());
    }
    tell(owner);
  }
}

void PeerRegions::follow(int owner, uint32_t region, uint64_t stamp) {
  const Board& board = boards_[static_cast<size_t>(owner)];
  Mapped& mapped = mapped_[static_cast<size_t>(owner)][region];
  mapped.stamp = stamp;
  try {
    std::shared_ptr<std::byte> data;
    if (is_live_stamp(stamp)) {
      data = source_.map(owner, board.entry(region).handle);
    }
    source_.set_entry(owner, region, data.get());
    mapped.data = std::move(data);  // lets go of what was there
  } catch (...) {
    // A region that is gone is acknowledged even then: its owner must not keep it for ever.
    board.acknowledge(rank_, region, stamp, is_live_stamp(stamp));
    throw;
  }
  board.acknowledge(rank_, region, stamp, false);
}

// Who left may still have kernels running, until it has unmapped everything.
bool PeerRegions::is_let_go(uint32_t region) const {
  const Board& own = boards_[static_cast<size_t>(rank_)];
  const uint64_t stamp = own.entry(region).stamp.load(std::memory_order_acquire);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (is_peer(rank) && !own.is_acknowledged(rank, region, stamp) && !is_unmapped_by(rank)) {
      return false;
    }
  }
  return true;
}

void PeerRegions::free_dead() {
  std::vector<uint32_t> dead;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
      if (slots_[region].use == Use::kDead) {
        dead.push_back(region);
      }
    }
  }
  for (const uint32_t region : dead) {  // stays dead: only this thread ends that
    if (is_let_go(region)) {
      try {
        source_.set_entry(rank_, region, nullptr);
      } catch (const std::exception& error) {  // once: the slot is free all the same
        log(LogLevel::kWarn, "peer memory: region {}: {}", region, error.what());
      }
      slots_[region].data.reset();  // not under the lock: it may wait for running kernels
      free_slot(region);
    }
  }
}

// --- life ---

void PeerRegions::close() {
  const std::lock_guard lock(close_mutex_);
  if (std::exchange(is_closed_, true)) {
    return;
  }
  if (service_.joinable()) {
    is_stopped_.store(true, std::memory_order_release);
    tell(rank_);
    service_.join();
  }
  transport_->close();  // first: whoever waits for this rank gives up
  try {
    source_.quiesce();
  } catch (const Error& error) {  // after a failed kernel nothing runs any more
    log(LogLevel::kDebug, "peer memory: close: {}", error.what());
  }
  for (auto& of_rank : mapped_) {
    for (Mapped& mapped : of_rank) {
      mapped.data.reset();
    }
  }
  boards_[static_cast<size_t>(rank_)].head().has_unmapped.store(1, std::memory_order_release);
}

PeerRegions::~PeerRegions() {
  try {
    close();
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: close: {}", error.what());
  }
}

}  // namespace weft
