// SPDX-License-Identifier: Apache-2.0
// Device memory that the other GPUs of a domain load and store. Purpose: regions on GPUs. May
// include: core, group, other transports (for the host board).
//
// Growth is local: allocate() publishes the region on a board in host memory and a service thread
// of each peer maps it, whatever the peer's other threads do. Until all have, is_reachable() is
// false and the region must not be named to peers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/peer_address.hpp"
#include "transport/transport.hpp"
#include "weft/group.hpp"

namespace weft {

struct PeerRegion {
  std::byte* data = nullptr;  // in this rank's address space, 2 MiB aligned in size
  uint64_t bytes = 0;
  uint32_t region = 0;  // index in the table
};

class PeerMemory {
 public:
  // Empty if GPU `device` of each rank can reach those of all others, else the reason. Collective.
  [[nodiscard]] static std::string obstacle(const Group& group, int device);

  // Collective; makes `device` current on this thread. Region 0 of every rank is `control_bytes` of
  // zeroed memory, mapped everywhere when this returns. Throws the same Error (kNotAvailable) on
  // every rank if any cannot reach another.
  PeerMemory(const Group& group, int device, uint64_t control_bytes);
  ~PeerMemory();  // peers may still have this rank's memory mapped; the driver keeps it for them
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // --- any thread ---
  // Zeroed, 2 MiB granular. Throws Error (kOutOfMemory, after a short wait if released memory is on
  // its way back). Not while a stream is captured.
  [[nodiscard]] PeerRegion allocate(uint64_t bytes);
  // As above, but nothing unless all peers map it before so long.
  [[nodiscard]] std::optional<PeerRegion> allocate_reachable(
      uint64_t bytes, std::chrono::milliseconds at_most
  );
  // No kernel of any rank may use it any more. The memory comes back when all peers have unmapped
  // it, after close() when this ends; returns at once. Throws Error (kInvalidArgument) for what is
  // not allocated.
  void release(const PeerRegion& region);
  // Whether every peer has mapped it, those that left or died aside; the second form waits so long,
  // or until a peer has failed to map it.
  [[nodiscard]] bool is_reachable(const PeerRegion& region) const;
  [[nodiscard]] bool wait_reachable(const PeerRegion& region, std::chrono::milliseconds at_most)
      const;
  // Until the memory of every released region is the system's again; false if it took longer.
  [[nodiscard]] bool wait_freed(std::chrono::milliseconds at_most) const;
  // The live region of this rank that holds these bytes.
  [[nodiscard]] std::optional<PeerRegion> find(const void* data, uint64_t bytes) const;

  [[nodiscard]] const PeerRegion& control() const;
  // Region 0 of any rank as this GPU maps it, from construction to close().
  [[nodiscard]] std::byte* control_of(int rank) const;
  // Device memory [num_ranks][kMaxPeerRegions]: every region as this GPU maps it, null = not
  // mapped.
  [[nodiscard]] std::byte* const* table() const;
  // How other ranks' memory is reached: "same process" or "ipc".
  [[nodiscard]] std::string_view how(int rank) const;
  // Ranks, this one included, whose GPU is this rank's own.
  [[nodiscard]] int ranks_on_this_gpu() const;
  [[nodiscard]] PeerState peer_state(int rank) const;
  // Tells peers that this rank leaves, waits for its running kernels and unmaps the memory of
  // others; its own stays until destruction, and as long as a peer maps it. Again: no effect.
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
