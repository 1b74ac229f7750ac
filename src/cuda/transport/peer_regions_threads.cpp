// SPDX-License-Identifier: Apache-2.0
// Two threads make this rank's table agree with the boards of its peers, and free what this rank
// has released once the peers have unmapped it. meet() of peer_regions.cpp calls the same functions
// while no thread runs.
#include <exception>
#include <utility>

#include "core/log.hpp"
#include "cuda/transport/peer_regions.hpp"

namespace weft {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(50);  // a guess: dead ranks raise nothing

}  // namespace

void PeerRegions::run(void (PeerRegions::*serve)()) {
  set_log_rank(rank_, num_ranks_);
  try {
    source_.enter_thread();
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: {}", error.what());
  }
  while (!is_stopped_.load(std::memory_order_acquire)) {
    const uint32_t seen = transport_->doorbell();
    try {
      (this->*serve)();
    } catch (const std::exception& error) {
      log(LogLevel::kWarn, "peer memory: {}", error.what());
    }
    if (!is_stopped_.load(std::memory_order_acquire)) {
      transport_->park(seen, kPatience);
    }
  }
}

std::vector<int> PeerRegions::changed_peers(std::vector<uint64_t>& seen) const {
  std::vector<int> changed;
  for (int owner = 0; owner < num_ranks_; ++owner) {
    if (!is_peer(owner)) {
      continue;
    }
    uint64_t& of_owner = seen[static_cast<size_t>(owner)];
    const uint64_t now = board_of(owner).num_changes.load(std::memory_order_acquire);
    if (now != std::exchange(of_owner, now)) {
      changed.push_back(owner);
    }
  }
  return changed;
}

void PeerRegions::map_new() {
  for (const int owner : changed_peers(seen_by_mapper_)) {
    for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
      try {
        map_new(owner, region);
      } catch (const std::exception& error) {
        log(LogLevel::kWarn, "peer memory: region {} of rank {}: {}", region, owner, error.what());
      }
    }
  }
}

// Holds the lock to the end: the other thread must not let go of what is being mapped here.
void PeerRegions::map_new(int owner, uint32_t region) {
  const std::lock_guard lock(mapped_mutex_);
  Board& board = board_of(owner);
  const uint64_t stamp = board.entries[region].stamp.load(std::memory_order_acquire);
  Mapped& mapped = mapped_[static_cast<size_t>(owner)][region];
  if (stamp == mapped.stamp || !is_live_stamp(stamp)) {
    return;
  }
  mapped.stamp = stamp;
  mapped.is_settled = false;
  try {
    mapped.data = source_.map(owner, board.entries[region].handle);
    source_.show_entry(owner, region, mapped.data.get());
  } catch (...) {
    board.acknowledge(rank_, region, stamp, true);
    tell(owner);
    throw;
  }
  board.acknowledge(rank_, region, stamp, false);
  tell(owner);
  has_unsettled_ = true;
  tell(rank_);
}

// Drops mappings of the last process in that place, but for its control region, whose addresses may
// stay. Memory is the system's again with the last mapping.
void PeerRegions::drop(int owner) {
  auto& of_owner = mapped_[static_cast<size_t>(owner)];
  for (uint32_t region = 1; region < kMaxPeerRegions; ++region) {
    if (of_owner[region].data != nullptr) {
      source_.set_entry(owner, region, nullptr);
    }
    of_owner[region] = {};
  }
}

void PeerRegions::map_control(int owner) {
  const Board::Entry& entry = board_of(owner).entries[0];
  Mapped& mapped = mapped_[static_cast<size_t>(owner)][0];
  std::shared_ptr<std::byte> before = std::exchange(mapped, {}).data;
  if (before == nullptr) {
    return;
  }
  mapped.data = source_.map_instead(std::move(before), owner, entry.handle);
  mapped.stamp = entry.stamp.load(std::memory_order_acquire);
  source_.show_entry(owner, 0, mapped.data.get());
  board_of(owner).acknowledge(rank_, 0, mapped.stamp, false);
}

void PeerRegions::settle() {
  std::vector<int> changed = changed_peers(seen_by_settler_);
  if (has_unsettled_.exchange(false)) {
    changed.clear();
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (is_peer(owner)) {
        changed.push_back(owner);
      }
    }
  }
  for (const int owner : changed) {
    for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
      try {
        settle(owner, region);
      } catch (const std::exception& error) {
        log(LogLevel::kWarn, "peer memory: region {} of rank {}: {}", region, owner, error.what());
      }
    }
  }
  free_dead();
}

void PeerRegions::settle(int owner, uint32_t region) {
  std::unique_lock lock(mapped_mutex_);
  const uint64_t stamp = board_of(owner).entries[region].stamp.load(std::memory_order_acquire);
  Mapped& mapped = mapped_[static_cast<size_t>(owner)][region];
  if (stamp == mapped.stamp && mapped.data != nullptr && !mapped.is_settled) {
    mapped.is_settled = true;
    std::byte* const data = mapped.data.get();
    lock.unlock();
    source_.set_entry(owner, region, data);
  } else if (stamp != mapped.stamp && !is_live_stamp(stamp)) {
    mapped.stamp = stamp;
    std::shared_ptr<std::byte> data = std::move(mapped.data);
    mapped.data = nullptr;
    lock.unlock();
    let_go(owner, region, stamp, std::move(data));
  }
}

// Acknowledges even after an error: the owner must not keep a region for ever.
void PeerRegions::let_go(
    int owner, uint32_t region, uint64_t stamp, std::shared_ptr<std::byte> data
) {
  std::exception_ptr problem;
  try {
    source_.set_entry(owner, region, nullptr);
  } catch (...) {
    problem = std::current_exception();
  }
  data.reset();
  board_of(owner).acknowledge(rank_, region, stamp, false);
  tell(owner);
  if (problem != nullptr) {
    std::rethrow_exception(problem);
  }
}

// Returns whether all peers have let go: one that left may run kernels until it has unmapped all.
bool PeerRegions::is_let_go(uint32_t region) const {
  Board& own = board_of(rank_);
  const uint64_t stamp = own.entries[region].stamp.load(std::memory_order_acquire);
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
      const std::lock_guard lock(mutex_);
      slots_[region] = {};
    }
  }
}

}  // namespace weft
