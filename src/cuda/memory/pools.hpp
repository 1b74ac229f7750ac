// SPDX-License-Identifier: Apache-2.0
// Pools of blocks of device memory in peers' reach, which are kept for reuse when their holder
// ends: outputs of any size (BlockPool) and plans (PlanPool). Freeing waits for the whole GPU, so
// it happens only when asked for.
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

// Regions and their blocks that no holder has.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(std::shared_ptr<PeerMemory> memory) : memory_(std::move(memory)) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] uint64_t used_bytes() const;
  [[nodiscard]] uint64_t unused_bytes() const;

 protected:
  // Cuts a region, which the pool then owns, into blocks of `block_bytes`.
  void add(const PeerRegion& region, uint64_t block_bytes);
  // Takes the block of `from` to which choose(from) points; null at the end. The block goes to `to`
  // when the pointer's last copy ends, in any thread. mutex_ is held.
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

// The pool of outputs; small blocks lie several to a region.
class BlockPool : public Pool {
 public:
  using Pool::Pool;
  // Takes a block of at least `bytes`.
  [[nodiscard]] std::shared_ptr<const Block> take(uint64_t bytes);
  // Releases regions none of whose blocks is in use.
  void release_unused();
};

// Memory of the plans of an exchange, which have one size. A block that a captured call took is
// written again by every replay, whatever the host holds, so only captured calls take it again.
class PlanPool : public Pool {
 public:
  PlanPool(std::shared_ptr<PeerMemory> memory, uint64_t plan_bytes)
      : Pool(std::move(memory)), plan_bytes_(plan_bytes) {}
  ~PlanPool();

  // Adds memory for `num_plans`. Adds none and returns false unless all peers map it within
  // `at_most`.
  [[nodiscard]] bool grow(uint64_t num_plans, std::chrono::milliseconds at_most);
  // Asks for more memory while a quarter is still unused, and takes it up in a later call, once
  // peers map it. Never waits for peers: one that is ahead may not map before its kernels end, and
  // these wait for this rank's next call.
  void look_ahead();
  // Takes a block; null if all are in use. `is_captured`: for a call inside a capture.
  [[nodiscard]] std::shared_ptr<const Block> take(bool is_captured);

 private:
  uint64_t plan_bytes_;
  std::optional<PeerRegion> coming_;  // peers may not map it yet
  bool may_look_ahead_ = true;        // there was memory the last time
};

}  // namespace weft
