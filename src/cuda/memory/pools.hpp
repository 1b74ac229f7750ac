// SPDX-License-Identifier: Apache-2.0
// Blocks of device memory in peers' reach, kept for the next use when their holder ends: outputs of
// any size (BlockPool) and plans (PlanPool). Freeing waits for the whole GPU, so it happens only
// when asked for.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/transport/peer_memory.hpp"

namespace weft {

struct Block {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  PeerAddress address;
};

// Some regions, and their blocks that nobody holds.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(std::shared_ptr<PeerMemory> memory) : memory_(std::move(memory)) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] uint64_t used_bytes() const;
  [[nodiscard]] uint64_t unused_bytes() const;

 protected:
  // The region, cut into blocks of so many bytes, belongs to the pool.
  void add(const PeerRegion& region, uint64_t block_bytes);
  // The block of `from` to which choose(from) points; null if that is their end. It goes back to
  // `to` when the last copy of the pointer does, from any thread. mutex_ is held.
  template <class Choose>
  [[nodiscard]] std::shared_ptr<const Block> take_from(
      std::vector<Block>& from, std::vector<Block>& to, const Choose& choose
  );

  std::shared_ptr<PeerMemory> memory_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<PeerRegion> regions_;
  std::vector<Block> unused_;
  std::vector<Block> in_graphs_;  // not held on the host, but graphs may write to them
  uint64_t used_bytes_ = 0;
};

// Small blocks lie several to a region.
class BlockPool : public Pool {
 public:
  using Pool::Pool;
  // Sizes are rounded up.
  [[nodiscard]] std::shared_ptr<const Block> take(uint64_t bytes);
  // Regions none of whose blocks is in use.
  void release_unused();
};

// Memory of the plans of an exchange, which have one size. A block that a captured call took is
// written again by every replay, whatever the host holds, so only captured calls take it again.
class PlanPool : public Pool {
 public:
  PlanPool(std::shared_ptr<PeerMemory> memory, uint64_t plan_bytes)
      : Pool(std::move(memory)), plan_bytes_(plan_bytes) {}
  ~PlanPool();

  // Memory for so many more plans. Nothing, and false, unless all peers map it before so long.
  [[nodiscard]] bool grow(uint64_t num_plans, std::chrono::milliseconds at_most);
  // Asks for more memory while a quarter is still unused, and takes it up in a later call, once
  // peers map it. Never waits for them: one that is ahead may not map before its kernels end, and
  // those wait for this rank's next call.
  void look_ahead();
  // Null if all are in use. `is_captured`: for a call inside a capture.
  [[nodiscard]] std::shared_ptr<const Block> take(bool is_captured);

 private:
  uint64_t plan_bytes_;
  std::optional<PeerRegion> coming_;  // peers may not map it yet
  bool may_look_ahead_ = true;        // there was memory the last time
};

}  // namespace weft
