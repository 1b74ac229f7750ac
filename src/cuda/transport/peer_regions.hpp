// SPDX-License-Identifier: Apache-2.0
// Tracks the regions of device memory that ranks share: which there are, where each is mapped, and
// when one may be freed. PeerRegions knows nothing of GPUs: a RegionSource (CudaRegions of
// peer_memory.hpp) makes and maps the memory, so that tests here need no GPU.
//
// Growth is local: allocate() publishes the region on a board in host memory (Board) and a thread
// of each peer maps it, whatever the peer's other threads do. Until all peers have, is_reachable()
// is false and the region must not be named to peers. The mapping thread waits for nothing on the
// GPU, where a kernel may wait for the growing rank; a second thread does what may have to wait.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/context.hpp"
#include "core/gpu/peer_address.hpp"
#include "cuda/transport/gpu_transport.hpp"
#include "transport/transport.hpp"

namespace weft {

// Data by which a peer finds a region.
struct RegionHandle {
  uint64_t id = 0;     // in the owner's process
  uint64_t bytes = 0;  // of the region
  ExportedMemory exported = {};
};
static_assert(std::is_trivially_copyable_v<RegionHandle>);

static_assert(std::atomic<uint64_t>::is_always_lock_free, "boards are shared by processes");

[[nodiscard]] constexpr bool is_live_stamp(uint64_t stamp) {
  return stamp % 2 != 0;
}

// Ranks that make a collective call. If they are only some of the group, an all_gather's blocks of
// the others mean nothing.
struct Meeting {
  std::vector<int> ranks = {};      // ascending; empty: all
  std::vector<int> newcomers = {};  // of these, ascending: new processes in their places

  [[nodiscard]] bool has(int rank) const {
    return ranks.empty() || std::ranges::binary_search(ranks, rank);
  }
  [[nodiscard]] bool is_new(int rank) const { return std::ranges::binary_search(newcomers, rank); }
};

// List of a rank's regions of device memory for its peers: one board per rank in host memory that
// all ranks map. Its owner writes the entries; each peer writes its row of acknowledgements.
//
// A stamp counts what happened to an entry: odd = the region is there, even = it is gone (0: there
// never was one). A peer acknowledges a stamp once its table agrees with it. The handle of an entry
// changes only when every peer that is alive has acknowledged the last even stamp, so a peer that
// has read an odd stamp may take its time to read the handle and map the region.
class Board {
 public:
  struct alignas(64) Entry {
    std::atomic<uint64_t> stamp = 0;
    RegionHandle handle;
  };

  // Notes that `rank`'s table agrees with `stamp` of the entry, or cannot be made to.
  void acknowledge(int rank, uint32_t region, uint64_t stamp, bool has_failed) {
    ack(rank, region).store(2 * stamp + (has_failed ? 1 : 0), std::memory_order_release);
  }
  [[nodiscard]] bool is_acknowledged(int rank, uint32_t region, uint64_t stamp) {
    return ack(rank, region).load(std::memory_order_acquire) == 2 * stamp;
  }
  [[nodiscard]] bool has_failed(int rank, uint32_t region, uint64_t stamp) {
    return ack(rank, region).load(std::memory_order_acquire) == 2 * stamp + 1;
  }

  // Takes over the entries of `before`, to tell peers that have connected again; newcomers have
  // acknowledged none.
  void take_over(const Board& before, const Meeting& who);

  std::atomic<uint64_t> num_changes = 0;   // of stamps: peers look at entries only when it differs
  std::atomic<uint64_t> has_unmapped = 0;  // the owner maps no rank's memory any more
  std::array<Entry, kMaxPeerRegions> entries;

 private:
  using Acks = std::array<std::atomic<uint64_t>, kMaxPeerRegions>;
  [[nodiscard]] std::atomic<uint64_t>& ack(int rank, uint32_t region) {
    return acks_[static_cast<size_t>(rank)][region];
  }

  std::array<Acks, kMaxDomainRanks> acks_ = {};
};

struct PeerRegion {
  std::byte* data = nullptr;  // in this rank's address space, 2 MiB aligned in size
  uint64_t bytes = 0;
  uint32_t region = 0;  // index in the table
};

struct OwnRegion {
  std::shared_ptr<std::byte> data;  // freed with its last user in this process
  RegionHandle handle;
};

// Source of regions, which also maps regions of peers. Any thread may call it.
class RegionSource {
 public:
  virtual ~RegionSource() = default;

  // Called first by each thread of PeerRegions.
  virtual void enter_thread() = 0;
  // Allocates zeroed memory; `bytes` is a multiple of 2 MiB. Throws Error (kOutOfMemory, kCuda).
  [[nodiscard]] virtual OwnRegion allocate(uint64_t bytes) = 0;
  // Maps a region of another rank; the last copy unmaps it. Throws Error.
  [[nodiscard]] virtual std::shared_ptr<std::byte> map(int rank, const RegionHandle& handle) = 0;
  // Maps memory of the rank's new process, if possible at the addresses of the old one's `mapping`,
  // which no kernel uses. Throws Error.
  [[nodiscard]] virtual std::shared_ptr<std::byte> map_instead(
      std::shared_ptr<std::byte> mapping, int rank, const RegionHandle& handle
  ) = 0;
  // Sets what this rank's kernels find under (rank, region), where they found nothing before. Must
  // not wait for kernels.
  virtual void show_entry(int rank, uint32_t region, std::byte* data) = 0;
  // Sets the entry for good, where kernels find it sooner; null: nothing. May wait for kernels, and
  // for other threads of the process that do (a copy to pageable memory on the default stream keeps
  // all others from the driver until it is through).
  virtual void set_entry(int rank, uint32_t region, std::byte* data) = 0;
  // Waits for this rank's running kernels, before memory that they may use is unmapped.
  virtual void quiesce() = 0;
};

class PeerRegions {
 public:
  // Collective; region 0 of every rank is mapped everywhere when it returns. Throws the same Error
  // on every rank. `source` outlives this.
  PeerRegions(
      const Group& group, RegionSource& source, uint64_t control_bytes, const Meeting& who = {}
  );
  // See PeerMemory::meet().
  void meet(const Group& group, const Meeting& who);
  ~PeerRegions();
  PeerRegions(const PeerRegions&) = delete;
  PeerRegions& operator=(const PeerRegions&) = delete;

  // --- any thread ---
  // Allocates zeroed memory, 2 MiB granular. Throws Error (kOutOfMemory, after a short wait if
  // released memory is on its way back). Not while a stream is captured.
  [[nodiscard]] PeerRegion allocate(uint64_t bytes);
  // Allocates like allocate(), but returns nothing unless all peers map the region within
  // `at_most`.
  [[nodiscard]] std::optional<PeerRegion> allocate_reachable(
      uint64_t bytes, std::chrono::milliseconds at_most
  );
  // Releases a region that no kernel of any rank uses any more; returns at once. The memory comes
  // back when all peers have unmapped it, after close() when this object ends. Throws Error
  // (kInvalidArgument) for what is not allocated.
  void release(const PeerRegion& region);
  // Returns whether every peer has mapped the region, those that left or died aside; the second
  // form waits for at most `at_most`, or until a peer has failed to map it.
  [[nodiscard]] bool is_reachable(const PeerRegion& region) const;
  [[nodiscard]] bool wait_reachable(const PeerRegion& region, std::chrono::milliseconds at_most)
      const;
  // Stops expecting these ranks, a bit each, to map regions.
  void forget(uint32_t ranks) { forgotten_.store(ranks, std::memory_order_relaxed); }
  // Waits until the memory of every released region is the system's again; false if it took longer.
  [[nodiscard]] bool wait_freed(std::chrono::milliseconds at_most) const;
  // Returns this rank's live region that holds these bytes.
  [[nodiscard]] std::optional<PeerRegion> find(const void* data, uint64_t bytes) const;

  [[nodiscard]] const PeerRegion& control() const { return control_; }
  // Returns region 0 of any rank as this GPU maps it, until close(); meet() may change it for a
  // rank that has come back. Null for a rank that was never connected.
  [[nodiscard]] std::byte* control_of(int rank) const;
  [[nodiscard]] PeerState peer_state(int rank) const { return transport_->peer_state(rank); }
  // Waits for the running kernels of this GPU, tells peers that this rank leaves and unmaps others'
  // memory; this rank's stays until destruction, and as long as a peer maps it. A second call has
  // no effect.
  void close();
  // Returns whether the peer, or the last process in its place, maps no rank's memory any more.
  [[nodiscard]] bool is_unmapped_by(int rank) const;
  // Returns whether no living peer maps this rank's memory any more.
  [[nodiscard]] bool is_unmapped_by_peers() const;
  // Keeps this rank's memory, once closed, until the process ends.
  void keep_memory();

 private:
  enum class Use : uint8_t { kFree, kTaken, kLive, kDead };
  struct Slot {
    Use use = Use::kFree;
    std::shared_ptr<std::byte> data;
  };
  struct Mapped {
    uint64_t stamp = 0;       // that this rank's table agrees with
    bool is_settled = false;  // set_entry() was called for it
    std::shared_ptr<std::byte> data;
  };
  enum class Reach : uint8_t { kNotYet, kAll, kNever };

  void connect(const Group& group, const Meeting& who);
  [[nodiscard]] Context context() const { return {.rank = rank_, .num_ranks = num_ranks_}; }
  // Returns whether this rank connected with `rank` in the last meet().
  [[nodiscard]] bool is_peer(int rank) const {
    return rank != rank_ && boards_[static_cast<size_t>(rank)] != nullptr;
  }
  [[nodiscard]] Board& board_of(int rank) const { return *boards_[static_cast<size_t>(rank)]; }
  [[nodiscard]] Reach reach(const PeerRegion& region) const;
  [[nodiscard]] PeerRegion make_region(uint64_t bytes);
  [[nodiscard]] uint32_t take_slot();
  void stamp(uint32_t region);
  void tell_all();
  void tell(int rank);
  [[nodiscard]] bool has_dead() const;
  template <class Done>
  void wait_until(std::chrono::milliseconds at_most, const Done& done) const;

  // --- the two threads (before they start and after they ended: the caller) ---
  void stop_threads();
  void run(void (PeerRegions::*serve)());
  // Returns peers whose boards have changed since `seen`, which is brought up to date.
  [[nodiscard]] std::vector<int> changed_peers(std::vector<uint64_t>& seen) const;
  // The first thread: maps what is new.
  void map_new();
  void map_new(int owner, uint32_t region);
  void map_control(int owner);
  void drop(int owner);
  // The second: settles what is new and what is gone, for good.
  void settle();
  void settle(int owner, uint32_t region);
  void let_go(int owner, uint32_t region, uint64_t stamp, std::shared_ptr<std::byte> data);
  void free_dead();
  [[nodiscard]] bool is_let_go(uint32_t region) const;

  RegionSource& source_;
  int rank_;
  int num_ranks_;
  uint64_t control_bytes_;
  std::unique_ptr<Transport> transport_;  // signal r: rank r changed a board
  std::vector<Board*> boards_;            // [num_ranks], as mapped here; null: not met
  uint32_t strays_ = 0;  // bits of ranks that were lost with memory of others mapped
  PeerRegion control_;

  mutable std::shared_mutex boards_mutex_;  // guards transport_ and boards_ in meet()
  mutable std::mutex mutex_;                // guards slots_ and live_
  std::array<Slot, kMaxPeerRegions> slots_;
  std::vector<PeerRegion> live_;  // ascending address

  std::mutex mapped_mutex_;                                  // guards mapped_
  std::vector<std::array<Mapped, kMaxPeerRegions>> mapped_;  // [num_ranks]
  std::vector<uint64_t> seen_by_mapper_;                     // changes, [num_ranks]
  std::vector<uint64_t> seen_by_settler_;                    // the same
  std::atomic<uint32_t> forgotten_ = 0;                      // bits of ranks
  std::atomic<bool> has_unsettled_ = false;
  std::atomic<bool> is_stopped_ = false;
  std::mutex close_mutex_;
  bool is_closed_ = false;
  std::thread mapper_;
  std::thread settler_;
};

}  // namespace weft
