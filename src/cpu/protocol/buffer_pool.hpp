// SPDX-License-Identifier: Apache-2.0
// Regions for the caller's outputs, kept for the next one when a Buffer ends. Sizes are rounded up
// to a few classes, so that calls of changing shape settle on a bounded set of regions.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/transport.hpp"

namespace weft {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}

  // Returns a region of at least `bytes`, which goes back with the last copy of the pointer, on any
  // thread.
  [[nodiscard]] std::shared_ptr<const Region> take(uint64_t bytes);
  // The live region that contains these bytes, if any.
  [[nodiscard]] std::optional<Region> find(const std::byte* data, uint64_t bytes) const;
  // Gives unused regions back to the system.
  void release_unused();
  // Takes regions in use away from all other processes: no rank sees what these write there from
  // now on. Addresses and contents stay. The transport is closed. Throws Error (kOutOfMemory).
  void withdraw();

  [[nodiscard]] uint64_t used_bytes() const;
  [[nodiscard]] uint64_t unused_bytes() const;

 private:
  void give_back(const Region& region);
  // Frees the longest unused regions beyond twice what is in use. Not on give_back(), which may
  // come from any thread, while the transport's memory calls belong to the exchange's.
  void trim();

  mutable std::mutex mutex_;
  std::shared_ptr<Transport> transport_;  // memory outlives the exchange while a Buffer does
  std::vector<Region> used_;
  std::vector<Region> unused_;
};

}  // namespace weft
