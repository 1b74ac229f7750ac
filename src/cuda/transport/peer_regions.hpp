// SPDX-License-Identifier: Apache-2.0
// The regions of all ranks, kept up to date by a service thread. Knows nothing of GPUs: a
// RegionSource makes and maps the memory.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/context.hpp"
#include "transport/peer/board.hpp"
#include "transport/peer/peer_memory.hpp"
#include "transport/peer/region_source.hpp"
#include "transport/transport.hpp"

namespace weft {

class PeerRegions {
 public:
  // Collective; region 0 of every rank is mapped everywhere when it returns. Throws the same Error
  // on every rank. `source` outlives this.
  PeerRegions(const Group& group, RegionSource& source, uint64_t control_bytes);
  ~PeerRegions();
  PeerRegions(const PeerRegions&) = delete;
  PeerRegions& operator=(const PeerRegions&) = delete;

  // --- any thread; as in PeerMemory ---
  [[nodiscard]] PeerRegion allocate(uint64_t bytes);
  [[nodiscard]] std::optional<PeerRegion> allocate_reachable(
      uint64_t bytes, std::chrono::milliseconds at_most
  );
  void release(const PeerRegion& region);
  [[nodiscard]] bool is_reachable(const PeerRegion& region) const;
  [[nodiscard]] bool wait_reachable(const PeerRegion& region, std::chrono::milliseconds at_most)
      const;
  [[nodiscard]] std::optional<PeerRegion> find(const void* data, uint64_t bytes) const;
  [[nodiscard]] const PeerRegion& control() const { return control_; }
  [[nodiscard]] std::byte* control_of(int rank) const;
  [[nodiscard]] PeerState peer_state(int rank) const { return transport_->peer_state(rank); }
  void close();
  // Whether no living peer maps this rank's memory any more.
  [[nodiscard]] bool is_unmapped_by_peers() const;
  // Until the memory of every released region is the system's again, or so long.
  [[nodiscard]] bool wait_freed(std::chrono::milliseconds at_most) const;

 private:
  enum class Use : uint8_t { kFree, kTaken, kLive, kDead };
  struct Slot {
    Use use = Use::kFree;
    std::shared_ptr<std::byte> data;
  };
  struct Mapped {
    uint64_t stamp = 0;  // that this rank's table agrees with
    std::shared_ptr<std::byte> data;
  };
  enum class Reach : uint8_t { kNotYet, kAll, kNever };

  void connect(const Group& group);
  [[nodiscard]] Context context() const { return {.rank = rank_, .num_ranks = num_ranks_}; }
  [[nodiscard]] bool is_peer(int rank) const { return rank != rank_; }
  [[nodiscard]] Reach reach(const PeerRegion& region) const;
  [[nodiscard]] PeerRegion make_region(uint64_t bytes);
  [[nodiscard]] uint32_t take_slot();
  void free_slot(uint32_t region);
  void publish(uint32_t region, const RegionHandle& handle, const PeerRegion& view);
  void stamp(uint32_t region);
  void tell_all();
  void tell(int rank);
  [[nodiscard]] bool has_dead() const;
  // Whether the peer maps nobody's memory any more.
  [[nodiscard]] bool is_unmapped_by(int rank) const;

  // --- the service thread (before it starts and after it ended: the caller) ---
  void run();
  void serve();
  void follow(int owner, bool live);
  void follow(int owner, uint32_t region, uint64_t stamp);
  void free_dead();
  [[nodiscard]] bool is_let_go(uint32_t region) const;

  RegionSource& source_;
  int rank_;
  int num_ranks_;
  std::unique_ptr<Transport> transport_;  // signal r: rank r changed a board
  std::vector<Board> boards_;             // [num_ranks]
  PeerRegion control_;

  mutable std::mutex mutex_;  // guards slots_ and live_
  std::array<Slot, kMaxPeerRegions> slots_;
  std::vector<PeerRegion> live_;  // ascending address

  std::vector<std::array<Mapped, kMaxPeerRegions>> mapped_;  // [num_ranks]
  std::vector<uint64_t> seen_changes_;                       // [num_ranks]
  std::atomic<bool> is_stopped_ = false;
  std::mutex close_mutex_;
  bool is_closed_ = false;
  std::thread service_;
};

}  // namespace weft
