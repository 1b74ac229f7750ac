// SPDX-License-Identifier: Apache-2.0
// Blocks of device memory in peers' reach, kept for the next use when their holder ends: outputs of
// any size, small ones several to a region. Freeing waits for the whole GPU, so it happens only
// when asked for.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/transport/peer_memory.hpp"

namespace weft {

struct Block {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  PeerAddress address;
};

class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  explicit BlockPool(std::shared_ptr<PeerMemory> memory);
  ~BlockPool();

  // Goes back when the last copy of the pointer does, from any thread; sizes are rounded up.
  [[nodiscard]] std::shared_ptr<const Block> take(uint64_t bytes);
  void release_unused();

  [[nodiscard]] uint64_t used_bytes() const;
  [[nodiscard]] uint64_t unused_bytes() const;

 private:
  [[nodiscard]] PeerRegion new_region(uint64_t bytes);
  void cut(const PeerRegion& region, uint64_t piece_bytes);
  [[nodiscard]] Block take_unused(uint64_t bytes);
  void give_back(const Block& block);

  mutable std::mutex mutex_;
  std::shared_ptr<PeerMemory> memory_;
  std::vector<PeerRegion> regions_;
  std::vector<Block> unused_;
  uint64_t used_bytes_ = 0;
};

}  // namespace weft
