// SPDX-License-Identifier: Apache-2.0
// Items of one chunk: arrivals of a pair, or tokens of a rank.
#pragma once

#include <algorithm>
#include <cstdint>

#include "exchange/region_map.hpp"

namespace weft {

struct ChunkRange {
  int64_t first = 0;
  int64_t last = 0;  // one past
};

[[nodiscard]] constexpr ChunkRange chunk_range(int64_t num_items, int64_t chunk) {
  const int64_t first = std::min(chunk * kChunkArrivals, num_items);
  return {first, std::min(first + kChunkArrivals, num_items)};
}

}  // namespace weft
