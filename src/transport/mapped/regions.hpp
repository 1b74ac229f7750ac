// SPDX-License-Identifier: Apache-2.0
// The regions of one rank that this rank has imported, by slot. Looked up by any thread without a
// lock, changed by one thread at a time. A region is dropped only when its owner released it, which
// it does only when nobody moves bytes there, so no lookup races with its own region's end.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>

#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"

namespace weft {

class RegionTable {
 public:
  struct View {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
    uint32_t generation = 0;  // 0: nothing imported
  };

  // --- any thread ---
  [[nodiscard]] View find(uint32_t slot) const;
  // Whether drop_released() may have work.
  [[nodiscard]] bool is_outdated(const SignalBlock& owner) const;

  // --- one thread at a time ---
  void insert(uint32_t slot, uint32_t generation, Memory memory);
  void erase(uint32_t slot);
  // Drops what the owner of these regions has released since the last call.
  void drop_released(const SignalBlock& owner);

 private:
  struct Entry {
    std::atomic<std::byte*> data = nullptr;
    std::atomic<uint64_t> bytes = 0;
    std::atomic<uint32_t> generation = 0;
    std::shared_ptr<void> owner;
  };
  // Made on first use, so that an idle table costs little; never freed before the table.
  static constexpr uint32_t kPageSlots = 64;
  struct Page {
    std::array<Entry, kPageSlots> entries;
  };
  [[nodiscard]] Entry* entry(uint32_t slot) const;

  std::array<std::atomic<Page*>, kMaxRegions / kPageSlots> pages_ = {};
  std::array<std::unique_ptr<Page>, kMaxRegions / kPageSlots> page_owners_;
  std::set<uint32_t> slots_;  // imported
  std::atomic<uint32_t> seen_releases_ = 0;
};

}  // namespace weft
