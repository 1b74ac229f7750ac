// SPDX-License-Identifier: Apache-2.0
// Regions as the fabric sees them: this rank's own, registered, and those of its peers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

#include "transport/mapped/memory.hpp"
#include "transport/ofi/fabric/fabric.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

// The registrations of this rank's regions with the fabric. Any thread.
class LocalRegions {
 public:
  // Memory is bound to `endpoint` if the provider binds it to one.
  LocalRegions(std::shared_ptr<Fabric> fabric, fid_ep* endpoint)
      : fabric_(std::move(fabric)), endpoint_(endpoint) {}

  // Makes a region writable over the fabric until remove(), and completes its cookie for peers.
  // `lent_from`: the device of memory that is not the transport's. Throws Error: kOutOfMemory
  // if the provider refuses the memory, kInvalidArgument if a region holds some of it already.
  void add(Region& region, std::optional<Device> lent_from = {});
  // Undoes add(); no effect if the region was not added.
  void remove(const RegionRef& region);
  // Makes no region writable over the fabric any more.
  void withdraw();
  struct Source {
    void* descriptor = nullptr;  // null: no region holds the bytes
    bool is_lent = false;
  };
  // Returns what a write out of these bytes needs, from the region that holds them.
  [[nodiscard]] Source source_at(const void* data, uint64_t bytes) const;
  // Returns whether a region is lent; cheap.
  [[nodiscard]] bool has_lent() const { return num_lent_.load(std::memory_order_relaxed) > 0; }

 private:
  // With mutex_ held.
  void check_apart(const Region& region) const;
  struct Entry {
    uint64_t bytes = 0;
    uint32_t slot = 0;
    uint32_t generation = 0;
    bool is_lent = false;
    Owned<fid_mr> memory;
  };

  std::shared_ptr<Fabric> fabric_;
  fid_ep* endpoint_;
  std::atomic<uint32_t> num_lent_ = 0;
  mutable std::shared_mutex mutex_;            // guards what follows
  std::map<const std::byte*, Entry> entries_;  // by first byte
};

// Words of RegionRef::cookie that the fabric needs; those before are for ranks that map the region.
constexpr size_t kBaseWord = std::tuple_size_v<Cookie>;
constexpr size_t kKeyWord = kBaseWord + 1;
static_assert(kKeyWord < std::size(RegionRef{}.cookie));

// The regions of one rank that this rank has imported, by slot, and which of them their owner has
// released. Any thread.
class RemoteRegions {
 public:
  struct View {
    uint64_t base = 0;  // what a write adds its offset to
    uint64_t key = 0;
    uint64_t bytes = 0;
    bool is_released = false;
  };

  // Returns the region under this slot; empty: none was imported.
  [[nodiscard]] std::optional<View> find(uint32_t slot) const;
  // Notes an import; false if the owner has released this generation, as far as this rank knows.
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
