// SPDX-License-Identifier: Apache-2.0
// How a call is cut into chunks, each with a signal of its own, and when it counts as short. For
// host and device.
#pragma once

#include <cstdint>

#include "core/hd.hpp"

namespace weft {

// --- GPUs: tokens of a rank ---

// Calls of at most so many tokens of a rank are short: latency decides them (a guess).
inline constexpr int64_t kShortCallTokens = 512;
inline constexpr int kLongChunkTokens = 4;

WEFT_HD constexpr bool is_short_call(int64_t num_tokens) {
  return num_tokens <= kShortCallTokens;
}

// Short calls have a signal for each token, longer ones fewer signals, as each costs a fence.
WEFT_HD constexpr int chunk_tokens(int64_t num_tokens) {
  return is_short_call(num_tokens) ? 1 : kLongChunkTokens;
}

// The divisors are constants, since a GPU divides by a variable slowly.
WEFT_HD constexpr int num_device_chunks(int64_t num_tokens) {
  return static_cast<int>(
      is_short_call(num_tokens) ? num_tokens
                                : (num_tokens + kLongChunkTokens - 1) / kLongChunkTokens
  );
}

// Returns the most chunks of a call of up to `max_tokens` tokens.
WEFT_HD constexpr uint32_t most_device_chunks(int64_t max_tokens) {
  const int chunks = num_device_chunks(max_tokens);
  return static_cast<uint32_t>(chunks < kShortCallTokens ? kShortCallTokens : chunks);
}

// --- CPUs and the network: arrivals of a pair, or tokens of a rank ---

// 32 rows of 4 KiB fill a sixteenth of a 2 MiB cache, so that a chunk is still warm when its
// receiver fans it out.
inline constexpr int64_t kChunkArrivals = 32;

WEFT_HD constexpr int64_t num_chunks(int64_t num_arrivals) {
  return (num_arrivals + kChunkArrivals - 1) / kChunkArrivals;
}

struct ChunkRange {
  int64_t first = 0;
  int64_t last = 0;  // one past
};

[[nodiscard]] constexpr ChunkRange chunk_range(int64_t num_items, int64_t chunk) {
  const auto within = [&](int64_t item) { return item < num_items ? item : num_items; };
  const int64_t first = within(chunk * kChunkArrivals);
  return {first, within(first + kChunkArrivals)};
}

}  // namespace weft
