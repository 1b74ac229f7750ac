// SPDX-License-Identifier: Apache-2.0
// Makes, finds and releases a rank's own regions, and connects ranks to share them.
// peer_regions_threads.cpp handles the regions of peers.
#include "cuda/transport/peer_regions.hpp"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "core/check.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"

namespace weft {
namespace {

constexpr uint64_t kGranularity = uint64_t{2} << 20;  // the driver's, of cuMemCreate
// The times are guesses.
constexpr auto kRoomPatience = std::chrono::seconds(2);  // for released memory to come back
constexpr auto kSlice = std::chrono::milliseconds(5);    // of a wait

constexpr uint64_t round_up(uint64_t bytes) {
  return (std::max<uint64_t>(bytes, 1) + kGranularity - 1) / kGranularity * kGranularity;
}

}  // namespace

void Board::take_over(const Board& before, const Meeting& who) {
  for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
    entries[region].handle = before.entries[region].handle;
    entries[region].stamp.store(before.entries[region].stamp, std::memory_order_relaxed);
  }
  for (int rank = 0; rank < kMaxDomainRanks; ++rank) {
    for (uint32_t region = 0; region < kMaxPeerRegions && !who.is_new(rank); ++region) {
      const Acks& acks = before.acks_[static_cast<size_t>(rank)];
      ack(rank, region).store(acks[region], std::memory_order_relaxed);
    }
  }
  num_changes.store(before.num_changes + 1, std::memory_order_release);
}

PeerRegions::PeerRegions(
    const Group& group, RegionSource& source, uint64_t control_bytes, const Meeting& who
)
    : source_(source),
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      control_bytes_(control_bytes),
      boards_(static_cast<size_t>(num_ranks_)),
      mapped_(static_cast<size_t>(num_ranks_)) {
  meet(group, who);
}

void PeerRegions::meet(const Group& group, const Meeting& who) {
  stop_threads();
  agree(group, [&] {  // no rank's threads write to boards any more
    WEFT_CHECK(
        context(),
        num_ranks_ <= kMaxDomainRanks,
        ErrorCode::kUnsupported,
        "open: {} ranks share GPU memory (at most {})",
        num_ranks_,
        kMaxDomainRanks
    );
  });
  connect(group, who);
  agree(group, [&] {
    if (control_.data == nullptr) {
      control_ = allocate(control_bytes_);
    }
  });
  agree(group, [&] {
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (is_peer(owner) && who.is_new(owner)) {
        drop(owner);
        map_control(owner);
      }
      for (uint32_t region = 0; is_peer(owner) && region < kMaxPeerRegions; ++region) {
        map_new(owner, region);
        settle(owner, region);
      }
    }
  });
  seen_by_mapper_.assign(static_cast<size_t>(num_ranks_), 0);
  seen_by_settler_ = seen_by_mapper_;
  is_stopped_ = false;
  mapper_ = std::thread([this] { run(&PeerRegions::map_new); });
  settler_ = std::thread([this] { run(&PeerRegions::settle); });
}

// Replaces all old boards at once, at the end: an error before changes nothing.
void PeerRegions::connect(const Group& group, const Meeting& who) {
  auto transport =
      make_transport("auto", group, static_cast<uint32_t>(num_ranks_), {.members = who.ranks});
  Region own;
  agree(group, [&] {
    own = transport->allocate(sizeof(Board));
    new (own.data) Board;
  });
  const std::vector<RegionRef> refs = gather_values(group, own.ref);
  std::vector<Board*> boards(static_cast<size_t>(num_ranks_));
  agree(group, [&] {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!who.has(rank)) {
        continue;
      }
      const RegionRef& ref = refs[static_cast<size_t>(rank)];
      transport->import(rank, ref);
      std::byte* const data = transport->mapped(rank, ref.slot);
      WEFT_CHECK(
          context(),
          data != nullptr,
          ErrorCode::kNotAvailable,
          "open: the host memory of rank {} cannot be mapped",
          rank
      );
      boards[static_cast<size_t>(rank)] = reinterpret_cast<Board*>(data);
    }
  });
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const uint32_t bit = uint32_t{1} << static_cast<uint32_t>(rank);
    if (who.has(rank)) {
      strays_ &= ~bit;
    } else if (is_peer(rank) && !is_unmapped_by(rank)) {
      strays_ |= bit;
    }
  }
  const std::lock_guard lock(boards_mutex_);
  if (boards_[static_cast<size_t>(rank_)] != nullptr) {
    boards[static_cast<size_t>(rank_)]->take_over(board_of(rank_), who);
  }
  boards_ = std::move(boards);
  transport_ = std::move(transport);
}

// --- telling ---

// Rings a peer; a rank that has gone is not told: peer_state() finds out that it has gone.
void PeerRegions::tell(int rank) {
  if (rank != rank_ && !is_peer(rank)) {
    return;
  }
  transport_->raise(rank, static_cast<uint32_t>(rank_), 1);
}

void PeerRegions::tell_all() {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    tell(rank);  // this rank too: it frees what is dead
  }
}

void PeerRegions::stamp(uint32_t region) {
  Board& own = board_of(rank_);
  own.entries[region].stamp.fetch_add(1, std::memory_order_release);
  own.num_changes.fetch_add(1, std::memory_order_release);
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

bool PeerRegions::has_dead() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(slots_, [](const Slot& slot) { return slot.use == Use::kDead; });
}

PeerRegion PeerRegions::make_region(uint64_t bytes) {
  const uint32_t region = take_slot();
  try {
    OwnRegion made = source_.allocate(bytes);
    const PeerRegion view = {.data = made.data.get(), .bytes = bytes, .region = region};
    source_.set_entry(rank_, region, view.data);
    const std::lock_guard lock(mutex_);
    slots_[region] = {Use::kLive, std::move(made.data)};
    live_.insert(
        std::ranges::lower_bound(live_, view.data, std::less<>{}, &PeerRegion::data), view
    );
    board_of(rank_).entries[region].handle = made.handle;
    stamp(region);
    return view;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    slots_[region] = {};
    throw;
  }
}

// Waits shortly for released memory and indices, which return when the peers have let go of them.
PeerRegion PeerRegions::allocate(uint64_t bytes) {
  const std::shared_lock boards(boards_mutex_);
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
  const std::shared_lock boards(boards_mutex_);
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
  if (!is_peer(rank)) {
    return (strays_ >> static_cast<uint32_t>(rank) & 1U) == 0;
  }
  return board_of(rank).has_unmapped.load(std::memory_order_acquire) != 0 ||
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

void PeerRegions::keep_memory() {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<std::byte>>;  // never freed, as is wanted
  const std::lock_guard lock(mutex);
  for (Slot& slot : slots_) {
    kept.push_back(std::move(slot.data));
  }
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

// meet() maps a control region, and no thread touches it afterwards.
std::byte* PeerRegions::control_of(int rank) const {
  return rank == rank_ ? control_.data : mapped_[static_cast<size_t>(rank)][0].data.get();
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
  Board& own = board_of(rank_);
  const uint64_t stamp = own.entries[region.region].stamp.load(std::memory_order_acquire);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const bool is_forgotten =
        (forgotten_.load(std::memory_order_relaxed) >> static_cast<uint32_t>(rank) & 1U) != 0;
    if (!is_peer(rank) || is_forgotten || own.is_acknowledged(rank, region.region, stamp)) {
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

// Asks done() until it returns true or the time is over; sleeps in between until a peer rings.
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
  const std::shared_lock boards(boards_mutex_);
  Reach now = Reach::kNotYet;
  wait_until(at_most, [&] { return (now = reach(region)) != Reach::kNotYet; });
  return now == Reach::kAll;
}

bool PeerRegions::wait_freed(std::chrono::milliseconds at_most) const {
  bool is_freed = false;
  wait_until(at_most, [&] { return is_freed = !has_dead(); });
  return is_freed;
}

// --- life ---

void PeerRegions::stop_threads() {
  is_stopped_.store(true, std::memory_order_release);
  if (transport_ != nullptr) {
    tell(rank_);
  }
  for (std::thread* thread : {&mapper_, &settler_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
}

void PeerRegions::close() {
  const std::lock_guard lock(close_mutex_);
  if (std::exchange(is_closed_, true)) {
    return;
  }
  // Kernels of this rank that still run may meet new memory of the others, who go by whether this
  // rank has left: until it has ended they find it here, with its threads.
  try {
    source_.quiesce();
  } catch (const Error& error) {  // after a failed kernel nothing runs any more
    log(LogLevel::kDebug, "peer memory: close: {}", error.what());
  }
  stop_threads();
  transport_->close();
  for (auto& of_rank : mapped_) {
    for (Mapped& mapped : of_rank) {
      mapped.data.reset();
    }
  }
  board_of(rank_).has_unmapped.store(1, std::memory_order_release);
}

PeerRegions::~PeerRegions() {
  try {
    close();
  } catch (const std::exception& error) {
    log(LogLevel::kWarn, "peer memory: close: {}", error.what());
  }
}

}  // namespace weft
