// SPDX-License-Identifier: Apache-2.0
// The regions that this rank allocated, each registered with the fabric. One thread at a time but
// for descriptor().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "transport/mapped/own_regions.hpp"
#include "transport/ofi/fabric.hpp"
#include "transport/transport.hpp"

namespace weft::ofi {

class LocalRegions {
 public:
  // `signals` holds the generations; `endpoint` is what memory is bound to, where it is.
  LocalRegions(std::shared_ptr<Fabric> fabric, const SignalBlock& signals, fid_ep* endpoint);

  // Throws Error (kOutOfMemory), also if the provider refuses the memory.
  [[nodiscard]] Region allocate(uint64_t bytes);
  void release(const RegionRef& region);
  // Of the region that holds these bytes, for writes out of it; null: none holds them. Any thread.
  [[nodiscard]] void* descriptor(const void* data, uint64_t bytes) const;

 private:
  struct Span {
    uint64_t bytes = 0;
    void* descriptor = nullptr;
  };

  std::shared_ptr<Fabric> fabric_;
  fid_ep* endpoint_;
  OwnRegions regions_;
  mutable std::shared_mutex mutex_;            // guards spans_
  std::map<const std::byte*, Span> spans_;     // by first byte
  std::map<uint32_t, const std::byte*> data_;  // by slot
};

}  // namespace weft::ofi
