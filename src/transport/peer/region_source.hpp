// SPDX-License-Identifier: Apache-2.0
// Where regions come from and how a peer maps them. The board is written against this interface, so
// that it is tested without a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace weft {

// How a peer maps a region; travels over the board.
struct RegionHandle {
  uint64_t id = 0;      // in the owner's process
  uint64_t bytes = 0;   // of the region
  uint64_t offset = 0;  // of the region in what the exported handle names
  std::array<std::byte, 64> exported = {};
};
static_assert(std::is_trivially_copyable_v<RegionHandle>);

struct OwnRegion {
  std::shared_ptr<std::byte> data;  // freed with its last user in this process
  RegionHandle handle;
};

// Any thread.
class RegionSource {
 public:
  virtual ~RegionSource() = default;

  // The service thread begins.
  virtual void enter_thread() = 0;
  // Zeroed; `bytes` is a multiple of 2 MiB. Throws Error (kOutOfMemory, kCuda).
  [[nodiscard]] virtual OwnRegion allocate(uint64_t bytes) = 0;
  // A region of another rank, unmapped with the last copy. Throws Error.
  [[nodiscard]] virtual std::shared_ptr<std::byte> map(int rank, const RegionHandle& handle) = 0;
  // What this rank's kernels find under (rank, region) from their next launch on; null: nothing.
  virtual void set_entry(int rank, uint32_t region, std::byte* data) = 0;
  // Waits for this rank's running kernels, before memory that they may use is unmapped.
  virtual void quiesce() = 0;
};

}  // namespace weft
