// SPDX-License-Identifier: Apache-2.0
// Copies of rows. Source and target must not overlap.
#pragma once

#include <cstdint>

namespace weft {

// For bytes that somebody reads soon: they pass through the caches.
void copy_bytes(void* to, const void* from, uint64_t bytes);

// For bytes that nobody reads soon: whole cache lines go to memory without being fetched first and
// without pushing others out of the caches. Other threads may see the stores late and out of order:
// the storing thread calls streaming_fence() before it tells anyone.
void copy_streaming(void* to, const void* from, uint64_t bytes);

// Orders this thread's copy_streaming() before its later stores.
void streaming_fence();

}  // namespace weft
