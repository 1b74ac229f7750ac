// SPDX-License-Identifier: Apache-2.0
// Transports loopback and shm differ only in where memory comes from and how a peer reaches it.
// Everything else is MappedTransport.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace weft {

// Tells a peer how to reach a Memory. It travels between ranks in the first words of a
// RegionRef::cookie.
using Cookie = std::array<uint64_t, 2>;
// The cookie of a region that no rank can map.
inline constexpr Cookie kLentCookie = {~uint64_t{0}, ~uint64_t{0}};

// Bytes that this rank can load and store; unmapped when the last holder is gone.
struct Memory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  Cookie cookie = {};
  std::shared_ptr<void> owner;
};

class MemorySource {
 public:
  virtual ~MemorySource() = default;
  [[nodiscard]] virtual std::string_view name() const = 0;  // of the transport; a literal
  // Returns memory, zero-filled and page aligned. Throws Error (kOutOfMemory).
  [[nodiscard]] virtual Memory allocate(uint64_t bytes) = 0;
  // Returns a peer's memory, of as many bytes as the peer allocated. With `is_handed_on` its cookie
  // is this process's own, by which others reach the memory when the peer is gone. Throws Error
  // (kNotAvailable) with the reason.
  [[nodiscard]] virtual Memory reach(const Cookie& cookie, uint64_t bytes, bool is_handed_on) = 0;
  [[nodiscard]] Memory reach(const Cookie& cookie, uint64_t bytes) {
    return reach(cookie, bytes, false);
  }
};

// Serves ranks that are threads of one process: a peer's pointer is used as it is.
[[nodiscard]] std::unique_ptr<MemorySource> make_loopback_memory();
// Serves processes of one host, which share memory; ranks may be threads of one process as well.
[[nodiscard]] std::unique_ptr<MemorySource> make_shm_memory();

}  // namespace weft
