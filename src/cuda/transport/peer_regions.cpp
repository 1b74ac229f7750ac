// SPDX-License-Identifier: Apache-2.0
// The owner's side of PeerRegions: regions are made, found and released. What peers do is in
// peer_service.cpp.
#include "cuda/transport/peer_regions.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/check.hpp"
#include "transport/agree.hpp"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kGranularity = uint64_t{2} << 20;  // the driver's, of cuMemCreate
// Both times are guesses.
constexpr auto kRoomPatience = std::chrono::seconds(2);  // for released memory to come back
constexpr auto kSlice = std::chrono::milliseconds(5);    // of a wait

constexpr uint64_t round_up(uint64_t bytes) {
  return (std::max<uint64_t>(bytes, 1) + kGranularity - 1) / kGranularity * kGranularity;
}

}  // namespace

PeerRegions::PeerRegions(const Group& group, RegionSource& source, uint64_t control_bytes)
    : source_(source),
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      boards_(static_cast<size_t>(num_ranks_)),
      mapped_(static_cast<size_t>(num_ranks_)),
      seen_changes_(static_cast<size_t>(num_ranks_), 0) {
  agree(group, [&] {
    WEFT_CHECK(
        context(),
        num_ranks_ <= kMaxDomainRanks,
        ErrorCode::kUnsupported,
        "open: {} ranks share GPU memory (at most {})",
        num_ranks_,
        kMaxDomainRanks
    );
  });
  transport_ = make_transport("auto", group, static_cast<uint32_t>(num_ranks_));
  connect(group);
  agree(group, [&] { control_ = allocate(control_bytes); });
  agree(group, [&] {
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (is_peer(owner)) {
        const BoardEntry& entry = boards_[static_cast<size_t>(owner)].entry(0);
        follow(owner, 0, entry.stamp.load(std::memory_order_acquire));
      }
    }
  });
  service_ = std::thread([this] { run(); });
}

void PeerRegions::connect(const Group& group) {
  Region own;
  agree(group, [&] {
    own = transport_->allocate(Board::num_bytes(num_ranks_));
    Board(own.data).clear(num_ranks_);
  });
  const auto refs = group.all_gather(std::as_bytes(std::span(&own.ref, 1)));
  agree(group, [&] {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      RegionRef ref;
      std::memcpy(&ref, refs[static_cast<size_t>(rank)].data(), sizeof ref);
      transport_->import(rank, ref);
      std::byte* const data = transport_->mapped(rank, ref.slot);
      WEFT_CHECK(
          context(),
          data != nullptr,
          ErrorCode::kNotAvailable,
          "open: the host memory of rank {} cannot be mapped",
          rank
      );
      boards_[static_cast<size_t>(rank)] = Board(data);
    }
  });
}

// --- telling ---

// A rank that has gone is not told; peer_state() finds out that it has.
void PeerRegions::tell(int rank) {
  transport_->raise(rank, static_cast<uint32_t>(rank_), 1);
}

void PeerRegions::tell_all() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    tell(rank);  // this rank too: its service thread frees what is dead
  }
}

void PeerRegions::stamp(uint32_t region) {
  const Board& own = boards_[static_cast<size_t>(rank_)];
  own.entry(region).stamp.fetch_add(1, std::memory_order_release);
  own.head().num_changes.fetch_add(1, std::memory_order_release);
}

// --- coming ---

uint32_t PeerRegions::take_slot() {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(slots_, [](const Slot& slot) { return slot.use == Use::kFree; });
  WEFT_CHECK(
      context(),
      found != slots_.end(),
      ErrorCode::kOutOfMemory,
      "allocate: all {} regions are in use",
      kMaxPeerRegions
  );
  found->use = Use::kTaken;
  return static_cast<uint32_t>(found - slots_.begin());
}

void PeerRegions::free_slot(uint32_t region) {
  const std::lock_guard lock(mutex_);
  slots_[region] = {};
}

bool PeerRegions::has_dead() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(slots_, [](const Slot& slot) { return slot.use == Use::kDead; });
}

void PeerRegions::publish(uint32_t region, const RegionHandle& handle, const PeerRegion& view) {
  const std::lock_guard lock(mutex_);
  slots_[region].use = Use::kLive;
  live_.insert(std::ranges::lower_bound(live_, view.data, std::less<>{}, &PeerRegion::data), view);
  boards_[static_cast<size_t>(rank_)].entry(region).handle = handle;
  stamp(region);
}

PeerRegion PeerRegions::make_region(uint64_t bytes) {
  const uint32_t region = take_slot();
  try {
    OwnRegion made = source_.allocate(bytes);
    const PeerRegion view = {.data = made.data.get(), .bytes = bytes, .region = region};
    source_.set_entry(rank_, region, view.data);
    slots_[region].data = std::move(made.data);  // taken: nobody else touches it
    publish(region, made.handle, view);
    return view;
  } catch (...) {
    free_slot(region);
    throw;
  }
}

// Memory and indices that were released return when the peers have let go of them; that is worth a
// short wait.
PeerRegion PeerRegions::allocate(uint64_t bytes) {
  const auto deadline = Clock::now() + kRoomPatience;
  for (;;) {
    const bool may_get_room = has_dead() && Clock::now() < deadline;
    try {
      const PeerRegion region = make_region(round_up(bytes));
      tell_all();
      return region;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory || !may_get_room) {
        throw;
      }
    }
    std::this_thread::sleep_for(kSlice);
  }
}

std::optional<PeerRegion> PeerRegions::allocate_reachable(
    uint64_t bytes, std::chrono::milliseconds at_most
) {
  const PeerRegion region = allocate(bytes);
  if (wait_reachable(region, at_most)) {
    return region;
  }
  release(region);
  return std::nullopt;
}

// --- going ---

void PeerRegions::release(const PeerRegion& region) {
  const std::lock_guard closing(close_mutex_);
  // Kernels of peers may run on: they let go when they close, and the memory goes with this object.
  if (is_closed_) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find_if(live_, [&](const PeerRegion& live) {
      return live.data == region.data && live.region == region.region;
    });
    WEFT_CHECK_ARG(
        context(),
        found != live_.end() && region.region != control_.region,
        "release: region {} is not allocated",
        region.region
    );
    live_.erase(found);
    slots_[region.region].use = Use::kDead;
    stamp(region.region);
  }
  tell_all();
}

bool PeerRegions::is_unmapped_by(int rank) const {
  const Board& board = boards_[static_cast<size_t>(rank)];
  return board.head().has_unmapped.load(std::memory_order_acquire) != 0 ||
         transport_->peer_state(rank) == PeerState::kDied;
}

bool PeerRegions::is_unmapped_by_peers() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (is_peer(rank) && !is_unmapped_by(rank)) {
      return false;
    }
  }
  return true;
}

// --- being found ---

std::optional<PeerRegion> PeerRegions::find(const void* data, uint64_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard lock(mutex_);
  auto after = std::ranges::upper_bound(live_, begin, std::less<>{}, [](const PeerRegion& live) {
    return static_cast<const std::byte*>(live.data);
  });
  if (after == live_.begin()) {
    return std::nullopt;
  }
  const PeerRegion& region = *--after;
  const auto offset = static_cast<uint64_t>(begin - region.data);
  const bool is_inside = offset <= region.bytes && bytes <= region.bytes - offset;
  return is_inside && offset < region.bytes ? std::optional(region) : std::nullopt;
}

// The constructor maps it, and the service thread never touches it.
std::byte* PeerRegions::control_of(int rank) const {
  return is_peer(rank) ? mapped_[static_cast<size_t>(rank)][0].data.get() : control_.data;
}

PeerRegions::Reach PeerRegions::reach(const PeerRegion& region) const {
  {
    const std::lock_guard lock(mutex_);
    const bool is_known = region.region < kMaxPeerRegions &&
                          slots_[region.region].use == Use::kLive &&
                          slots_[region.region].data.get() == region.data;
    if (!is_known) {
      return Reach::kNever;
    }
  }
  const Board& own = boards_[static_cast<size_t>(rank_)];
  const uint64_t stamp = own.entry(region.region).stamp.load(std::memory_order_acquire);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!is_peer(rank) || own.is_acknowledged(rank, region.region, stamp)) {
      continue;
    }
    if (own.has_failed(rank, region.region, stamp)) {
      return Reach::kNever;
    }
    if (transport_->peer_state(rank) == PeerState::kAlive) {
      return Reach::kNotYet;
    }
  }
  return Reach::kAll;
}

bool PeerRegions::is_reachable(const PeerRegion& region) const {
  return reach(region) == Reach::kAll;
}

// Asks done() again and again until it says true or the time is over, and sleeps in between until
// a peer rings.
template <class Done>
void PeerRegions::wait_until(std::chrono::milliseconds at_most, const Done& done) const {
  const auto deadline = Clock::now() + at_most;
  for (;;) {
    const uint32_t seen = transport_->doorbell();
    const bool is_done = done();
    const auto left = deadline - Clock::now();
    if (is_done || left.count() <= 0) {
      return;
    }
    transport_->park(seen, std::min<std::chrono::nanoseconds>(left, kSlice));
  }
}

bool PeerRegions::wait_reachable(const PeerRegion& region, std::chrono::milliseconds at_most)
    const {
  Reach now = Reach::kNotYet;
  wait_until(at_most, [&] { return (now = reach(region)) != Reach::kNotYet; });
  return now == Reach::kAll;
}

bool PeerRegions::wait_freed(std::chrono::milliseconds at_most) const {
  bool is_freed = false;
  wait_until(at_most, [&] { return is_freed = !has_dead(); });
  return is_freed;
}

}  // namespace weft
