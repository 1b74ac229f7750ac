// SPDX-License-Identifier: Apache-2.0
// The regions of one rank that this rank has imported, by slot, and which of them their owner has
// released. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

#include "transport/mapped/memory.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

// Words of RegionRef::cookie that the fabric needs; those before are for ranks that map the region.
constexpr size_t kBaseWord = std::tuple_size_v<Cookie>;
constexpr size_t kKeyWord = kBaseWord + 1;
static_assert(kKeyWord < std::size(RegionRef{}.cookie));

class RemoteRegions {
 public:
  struct View {
    uint64_t base = 0;  // what a write adds its offset to
    uint64_t key = 0;
    uint64_t bytes = 0;
    bool is_released = false;
  };

  // Empty: nothing was imported under this slot.
  [[nodiscard]] std::optional<View> find(uint32_t slot) const;
  // False if the owner has released this generation, as far as it has told.
  [[nodiscard]] bool insert(const RegionRef& region);
  void release(uint32_t slot, uint32_t generation);

 private:
  struct Entry {
    RegionRef region;                  // generation 0: never imported
    uint32_t released_generation = 0;  // the newest
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<uint32_t, Entry> entries_;  // by slot
};

}  // namespace weft::ofi
