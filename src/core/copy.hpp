// SPDX-License-Identifier: Apache-2.0
// Copies of rows. Source and target must not overlap.
#pragma once

#include <cstdint>

namespace weft {

// Copies bytes that are read soon, through the caches.
void copy_bytes(void* to, const void* from, uint64_t bytes);

// Copies bytes that are not read soon: whole cache lines go to memory without being fetched first
// and without pushing others out of the caches. Other threads may see the stores late and out of
// order: the storing thread calls streaming_fence() before it tells other threads.
void copy_streaming(void* to, const void* from, uint64_t bytes);

// Orders this thread's copy_streaming() before its later stores.
void streaming_fence();

// Returns whether a call that writes `bytes` in all should stream. Rows of 4096 B, GB/s plain and
// streamed (Xeon at 2.3 GHz, one core of a virtual machine, 2026-11-20):
//   total    copied once   copied, then read   each source row written 4 times
//    16 MiB  13.8  16.7       7.0   4.9          20.7  21.4
//    64 MiB   7.6  10.3       4.0   3.2          10.7  20.7
//   256 MiB   6.6  10.0       3.3   3.9           8.5  16.4
[[nodiscard]] constexpr bool prefers_streaming(uint64_t bytes) {
  return bytes >= (uint64_t{48} << 20);
}

}  // namespace weft
