// SPDX-License-Identifier: Apache-2.0
// Regions by slot: those that this rank allocated, and those of its peers that it has imported.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "core/check.hpp"
#include "transport/mapped/memory.hpp"
#include "transport/mapped/signal_block.hpp"
#include "transport/transport.hpp"

namespace weft {

// The regions that this rank allocated. Their generations stand in the signal block, where peers
// see what is alive. One thread at a time.
class OwnRegions {
 public:
  OwnRegions() = default;
  OwnRegions(const OwnRegions&) = delete;
  OwnRegions& operator=(const OwnRegions&) = delete;
  ~OwnRegions();  // peers drop what they have mapped at their next import()

  void publish_in(const SignalBlock& signals) { signals_ = signals; }
  [[nodiscard]] Region add(Memory memory, uint64_t bytes, const Context& context);
  void remove(const RegionRef& region, const Context& context);
  [[nodiscard]] const Memory& at(uint32_t slot) const { return memories_.at(slot); }

 private:
  SignalBlock signals_;
  std::map<uint32_t, Memory> memories_;  // by slot
  uint32_t last_generation_ = 0;
};

// The regions of one rank that this rank has imported. Looked up by any thread without a
// lock, changed by one thread at a time. A region that its owner released is dropped when this rank
// imports another one, which it does while none of its workers moves bytes, so no lookup races with
// its own region's end.
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
  [[nodiscard]] bool is_outdated(const SignalBlock& owner) const {
    return owner.num_releases() != seen_releases_.load(std::memory_order_relaxed);
  }

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
