// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/mapped_transport.hpp"

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <utility>

#include "core/copy.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "transport/common.hpp"

namespace weft {
namespace {

// How a rank tells its peers where its signals are.
struct Hello {
  uint64_t bytes = 0;
  uint64_t num_signals = 0;
  Cookie cookie = {};
};

}  // namespace

MappedTransport::MappedTransport(
    std::unique_ptr<MemorySource> source,
    const Group& group,
    uint32_t num_signals,
    std::span<const int> members
)
    : source_(std::move(source)),
      context_(context_of(group, source_->name())),
      num_signals_(num_signals),
      spin_(spin_time(group)),
      peers_(static_cast<size_t>(group.num_ranks())) {
  Hello hello = {.num_signals = num_signals};
  Memory block;
  agree(group, [&] {
    block = source_->allocate(SignalBlock::num_bytes(num_signals));
    own_ = SignalBlock(block.data);
    own_.set_pid();
    own_regions_.publish_in(own_);
    hello.bytes = block.bytes;
    hello.cookie = block.cookie;
  });
  const std::vector<Bytes> hellos = group.all_gather(std::as_bytes(std::span(&hello, 1)));
  agree(group, [&] {
    for (int rank = 0; rank < context_.num_ranks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      if (!members.empty() && std::find(members.begin(), members.end(), rank) == members.end()) {
        continue;
      }
      peers_[at] = std::make_unique<Peer>();
      if (rank == context_.rank) {
        peers_[at]->memory = block;
        peers_[at]->signals = own_;
      } else {
        connect(rank, hellos[at]);
      }
    }
  });
}

void MappedTransport::connect(int rank, const Bytes& block) {
  const auto hello = block_value<Hello>(block, static_cast<size_t>(rank), context_);
  check_same_signals(context_, rank, hello.num_signals, num_signals_);
  Peer& to = *peers_[static_cast<size_t>(rank)];
  to.memory = source_->reach(hello.cookie, hello.bytes);
  to.signals = SignalBlock(to.memory.data);
  if (to.signals.pid() != ::getpid()) {
    to.watch = ProcessWatch(to.signals.pid());
  }
}

MappedTransport::Peer& MappedTransport::peer(std::string_view verb, int rank) const {
  check_rank(context_, verb, rank);
  WEFT_CHECK(
      context_,
      has_member(rank),
      ErrorCode::kTransport,
      "{}: rank {} is in another domain",
      verb,
      rank
  );
  return *peers_[static_cast<size_t>(rank)];
}

// --- regions by slot ---

OwnRegions::~OwnRegions() {
  if (!memories_.empty() && signals_.is_here()) {
    for (const auto& [slot, memory] : memories_) {
      signals_.set_generation(slot, 0);
    }
  }
}

Region OwnRegions::add(Memory memory, uint64_t bytes, const Context& context) {
  WEFT_CHECK(
      context,
      memories_.size() < kMaxRegions,
      ErrorCode::kOutOfMemory,
      "allocate: all {} regions are in use",
      kMaxRegions
  );
  uint32_t slot = 0;
  for (auto it = memories_.begin(); it != memories_.end() && it->first == slot; ++it) {
    ++slot;
  }
  last_generation_ = std::max<uint32_t>(last_generation_ + 1, 1);  // 0 means none, after a wrap too
  const uint32_t generation = last_generation_;
  Region region = {
      .data = memory.data, .ref = {.slot = slot, .generation = generation, .bytes = bytes}};
  std::copy(memory.cookie.begin(), memory.cookie.end(), region.ref.cookie);
  memories_[slot] = std::move(memory);
  signals_.set_generation(slot, generation);
  return region;
}

void OwnRegions::remove(const RegionRef& region, const Context& context) {
  const auto found = memories_.find(region.slot);
  WEFT_CHECK(
      context,
      found != memories_.end() && signals_.generation(region.slot) == region.generation,
      ErrorCode::kTransport,
      "release: region {} generation {} is not allocated",
      region.slot,
      region.generation
  );
  signals_.set_generation(region.slot, 0);
  memories_.erase(found);
}

RegionTable::Entry* RegionTable::entry(uint32_t slot) const {
  Page* page =
      slot < kMaxRegions ? pages_[slot / kPageSlots].load(std::memory_order_acquire) : nullptr;
  return page == nullptr ? nullptr : &page->entries[slot % kPageSlots];
}

RegionTable::View RegionTable::find(uint32_t slot) const {
  const Entry* found = entry(slot);
  // Pairs with the release in insert(): a generation seen means data and bytes seen.
  const uint32_t generation =
      found == nullptr ? 0 : found->generation.load(std::memory_order_acquire);
  if (generation == 0) {
    return {};
  }
  return {
      .data = found->data.load(std::memory_order_relaxed),
      .bytes = found->bytes.load(std::memory_order_relaxed),
      .generation = generation};
}

void RegionTable::insert(uint32_t slot, uint32_t generation, Memory memory) {
  erase(slot);
  const uint32_t page_idx = slot / kPageSlots;
  if (page_owners_[page_idx] == nullptr) {
    page_owners_[page_idx] = std::make_unique<Page>();
    pages_[page_idx].store(page_owners_[page_idx].get(), std::memory_order_release);
  }
  Entry& place = *entry(slot);
  place.owner = std::move(memory.owner);
  place.data.store(memory.data, std::memory_order_relaxed);
  place.bytes.store(memory.bytes, std::memory_order_relaxed);
  place.generation.store(generation, std::memory_order_release);
  slots_.insert(slot);
}

void RegionTable::erase(uint32_t slot) {
  if (slots_.erase(slot) > 0) {
    Entry& place = *entry(slot);
    place.generation.store(0, std::memory_order_release);
    place.owner.reset();
  }
}

void RegionTable::drop_released(const SignalBlock& owner) {
  const uint32_t num_releases = owner.num_releases();
  if (std::exchange(seen_releases_, num_releases) == num_releases) {
    return;
  }
  for (const uint32_t slot : std::set(slots_)) {
    if (owner.generation(slot) != find(slot).generation) {
      erase(slot);
    }
  }
}

// --- memory ---

Region MappedTransport::allocate(uint64_t bytes) {
  Memory memory = source_->allocate(std::max<uint64_t>(bytes, 1));
  const std::lock_guard lock(memory_mutex_);
  return own_regions_.add(std::move(memory), bytes, context_);
}

Region MappedTransport::add_lent(std::byte* data, uint64_t bytes) {
  Memory memory = {.data = data, .bytes = bytes, .cookie = kLentCookie, .owner = nullptr};
  const std::lock_guard lock(memory_mutex_);
  return own_regions_.add(std::move(memory), bytes, context_);
}

void MappedTransport::release(const RegionRef& region) {
  if (!own_.is_here()) {
    return;
  }
  const std::lock_guard lock(memory_mutex_);
  own_regions_.remove(region, context_);
  peer("release", context_.rank).regions.drop_released(own_);
}

void MappedTransport::import(int rank, const RegionRef& region) {
  Peer& from = peer("import", rank);
  const bool is_current = region.slot < kMaxRegions && region.generation != 0 &&
                          from.signals.generation(region.slot) == region.generation;
  check_importable(context_, rank, region, is_current);
  WEFT_CHECK(
      context_,
      !std::equal(kLentCookie.begin(), kLentCookie.end(), region.cookie),
      ErrorCode::kTransport,
      "import: region {} of rank {} is lent; only ranks that share no memory with it reach it",
      region.slot,
      rank
  );
  const std::lock_guard lock(memory_mutex_);
  from.regions.drop_released(from.signals);
  if (from.regions.find(region.slot).generation == region.generation) {
    return;
  }
  Memory memory;
  if (rank == context_.rank) {
    memory = own_regions_.at(region.slot);
  } else {
    Cookie cookie = {};
    std::copy_n(std::begin(region.cookie), cookie.size(), cookie.begin());
    try {
      memory = source_->reach(cookie, std::max<uint64_t>(region.bytes, 1));
    } catch (const Error& error) {
      WEFT_RAISE(
          context_.without(rank),
          error.code(),
          "import: region {} of rank {} is out of reach ({})",
          region.slot,
          rank,
          error.what()
      );
    }
  }
  memory.bytes = region.bytes;
  from.regions.insert(region.slot, region.generation, std::move(memory));
}

// --- moving ---

void MappedTransport::put(int rank, std::span<const Put> puts) {
  Peer& to = peer("put", rank);
  for (const Put& put : puts) {
    const RegionTable::View view = to.regions.find(put.region);
    const bool is_imported = view.generation != 0;  // else the slot may be any number
    const PutRegion region = {
        .is_imported = is_imported,
        .is_released = is_imported && view.generation != to.signals.generation(put.region),
        .bytes = view.bytes};
    check_put(context_, rank, put, region, num_signals_);
  }
  for (size_t i = 0; i < puts.size();) {
    const uint32_t signal = puts[i].signal;
    uint64_t amount = 0;  // neighbours with one signal share one atomic addition
    for (; i < puts.size() && puts[i].signal == signal; ++i, ++amount) {
      copy_bytes(
          to.regions.find(puts[i].region).data + puts[i].offset, puts[i].source, puts[i].bytes
      );
    }
    to.signals.raise(signal, amount);
  }
  if (!puts.empty()) {
    to.signals.ring();
  }
}

void MappedTransport::raise(int rank, uint32_t signal, uint64_t amount) {
  Peer& to = peer("raise", rank);
  check_signal(context_, "raise", rank, signal, num_signals_);
  streaming_fence();  // the caller may have stored by copy_streaming()
  to.signals.raise(signal, amount);
  to.signals.ring();
}

std::byte* MappedTransport::mapped(int rank, uint32_t region) const {
  const Peer& to = peer("mapped", rank);
  const RegionTable::View view = to.regions.find(region);
  const bool is_current = view.generation != 0 && view.generation == to.signals.generation(region);
  return is_current ? view.data : nullptr;
}

// --- waiting ---

uint64_t MappedTransport::signal_value(uint32_t signal) const {
  check_signal(context_, "wait", context_.rank, signal, num_signals_);
  return own_.signal(signal);
}

void MappedTransport::park(uint32_t seen, std::chrono::nanoseconds at_most) {
  const auto has_moved = [&] { return own_.doorbell() != seen; };
  const auto left = spin_until(spin_, at_most, has_moved, [](size_t) { hwy::Pause(); });
  if (left.count() > 0) {
    own_.sleep(seen, left);
  }
}

// --- life ---

PeerState MappedTransport::peer_state(int rank) const {
  const Peer& of = peer("peer_state", rank);
  const bool is_alive = of.watch.is_alive();  // first: a peer may leave and then end
  if (of.signals.has_left()) {
    return PeerState::kLeft;
  }
  return is_alive ? PeerState::kAlive : PeerState::kDied;
}

void MappedTransport::leave(int dead) {
  if (std::exchange(is_closed_, true) || !own_.is_here()) {
    return;
  }
  own_.set_left(dead);
  for (const auto& to : peers_) {
    if (to != nullptr) {
      to->signals.ring();  // a parked rank learns of it now
    }
  }
}

}  // namespace weft
