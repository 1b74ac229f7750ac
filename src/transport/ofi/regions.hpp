// SPDX-License-Identifier: Apache-2.0
// The registrations of this rank's regions with the fabric. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "transport/ofi/fabric.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

class LocalRegions {
 public:
  // `endpoint` is what memory is bound to, where it is.
  LocalRegions(std::shared_ptr<Fabric> fabric, fid_ep* endpoint)
      : fabric_(std::move(fabric)), endpoint_(endpoint) {}

  // Makes it writable over the fabric until remove(), and completes its cookie for peers there.
  // `lent_from`: where the memory is that is not the transport's. Throws Error: kOutOfMemory if the
  // provider refuses the memory, kInvalidArgument if a region holds some of it already.
  void add(Region& region, std::optional<Device> lent_from = {});
  // Nothing happens if it was not added.
  void remove(const RegionRef& region);
  struct Source {
    void* descriptor = nullptr;  // null: no region holds the bytes
    bool is_lent = false;
  };
  // Of the region that holds these bytes, for writes out of it.
  [[nodiscard]] Source source_at(const void* data, uint64_t bytes) const;
  // Whether a region is lent; cheap.
  [[nodiscard]] bool has_lent() const { return num_lent_.load(std::memory_order_relaxed) > 0; }

 private:
  // With mutex_ held.
  void check_apart(const Region& region) const;
  struct Entry {
    uint64_t bytes = 0;
    uint32_t generation = 0;
    bool is_lent = false;
    Owned<fid_mr> memory;
  };

  std::shared_ptr<Fabric> fabric_;
  fid_ep* endpoint_;
  std::atomic<uint32_t> num_lent_ = 0;
  mutable std::shared_mutex mutex_;            // guards what follows
  std::map<const std::byte*, Entry> entries_;  // by first byte
  std::map<uint32_t, const std::byte*> data_;  // by slot
};

}  // namespace weft::ofi
