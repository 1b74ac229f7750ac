// SPDX-License-Identifier: Apache-2.0
// What a rank's regions of device memory look like to its peers: one board per rank in host memory
// that all ranks map. Its owner (peer_regions.cpp) writes the entries; each peer (peer_service.cpp)
// writes its row of acknowledgements.
//
// A stamp counts what happened to an entry: odd = the region is there, even = it is gone (0: there
// never was one). A peer acknowledges a stamp once its table agrees with it. The handle of an entry
// changes only when every peer that is alive has acknowledged the last even stamp, so whoever has
// read an odd stamp may take its time to read the handle and map the region.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <type_traits>

#include "core/gpu/peer_address.hpp"
#include "cuda/transport/gpu_transport.hpp"

namespace weft {

// How a peer finds a region.
struct RegionHandle {
  uint64_t id = 0;     // in the owner's process
  uint64_t bytes = 0;  // of the region
  ExportedMemory exported = {};
};
static_assert(std::is_trivially_copyable_v<RegionHandle>);

static_assert(std::atomic<uint64_t>::is_always_lock_free, "boards are shared by processes");

struct alignas(64) BoardEntry {
  std::atomic<uint64_t> stamp = 0;
  RegionHandle handle;
};

struct alignas(64) BoardHead {
  std::atomic<uint64_t> num_changes = 0;   // of stamps: peers look at entries only when it differs
  std::atomic<uint64_t> has_unmapped = 0;  // the owner maps nobody's memory any more
};

[[nodiscard]] constexpr bool is_live_stamp(uint64_t stamp) {
  return stamp % 2 != 0;
}

// Typed access to a board's bytes.
class Board {
 public:
  Board() = default;
  explicit Board(std::byte* data) : data_(data) {}

  [[nodiscard]] static uint64_t num_bytes(int num_ranks) {
    return acks_offset() + static_cast<uint64_t>(num_ranks) * kMaxPeerRegions * sizeof(Ack);
  }
  // The owner, before any peer looks.
  void clear(int num_ranks) const {
    new (data_) BoardHead;
    for (uint32_t region = 0; region < kMaxPeerRegions; ++region) {
      new (&entry(region)) BoardEntry;
      for (int rank = 0; rank < num_ranks; ++rank) {
        new (&ack(rank, region)) Ack(0);
      }
    }
  }

  [[nodiscard]] BoardHead& head() const { return *reinterpret_cast<BoardHead*>(data_); }
  [[nodiscard]] BoardEntry& entry(uint32_t region) const {
    return reinterpret_cast<BoardEntry*>(data_ + sizeof(BoardHead))[region];
  }

  // `rank`'s table agrees with `stamp` of the entry, or cannot be made to.
  void acknowledge(int rank, uint32_t region, uint64_t stamp, bool has_failed) const {
    ack(rank, region).store(2 * stamp + (has_failed ? 1 : 0), std::memory_order_release);
  }
  [[nodiscard]] bool is_acknowledged(int rank, uint32_t region, uint64_t stamp) const {
    return ack(rank, region).load(std::memory_order_acquire) == 2 * stamp;
  }
  [[nodiscard]] bool has_failed(int rank, uint32_t region, uint64_t stamp) const {
    return ack(rank, region).load(std::memory_order_acquire) == 2 * stamp + 1;
  }

 private:
  using Ack = std::atomic<uint64_t>;
  [[nodiscard]] static constexpr uint64_t acks_offset() {
    return sizeof(BoardHead) + kMaxPeerRegions * sizeof(BoardEntry);
  }
  [[nodiscard]] Ack& ack(int rank, uint32_t region) const {
    return reinterpret_cast<Ack*>(
        data_ + acks_offset()
    )[static_cast<uint32_t>(rank) * kMaxPeerRegions + region];
  }

  std::byte* data_ = nullptr;
};

}  // namespace weft
