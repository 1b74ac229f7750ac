// SPDX-License-Identifier: Apache-2.0
// Offsets of the areas that a call between domains uses: taken one after the other, aligned, before
// the memory is reserved as a whole.
#pragma once

#include <cstdint>

#include "exchange/region_map.hpp"
#include "kernels/crossing_chunk.hpp"

namespace weft {

class AreaMap {
 public:
  static constexpr uint64_t kAlignment = 256;

  // Offset of the next area.
  uint64_t add(int64_t bytes) {
    const uint64_t offset = num_bytes_;
    num_bytes_ = align_up(offset + static_cast<uint64_t>(bytes), kAlignment);
    return offset;
  }
  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }

 private:
  uint64_t num_bytes_ = 0;
};

// Messages of about a megabyte: smaller ones cost a network more than they carry. At least `least`
// rows, so that there is a signal for each message.
[[nodiscard]] constexpr CrossingChunk crossing_chunk(
    int64_t row_bytes, int64_t weight_bytes, int64_t scale_bytes, int64_t least
) {
  constexpr int64_t kMessageBytes = int64_t{1} << 20;
  CrossingChunk chunk = {row_bytes, weight_bytes, scale_bytes, least};
  const int64_t token = chunk.token_bytes();
  if (token > 0 && kMessageBytes / token > least) {
    chunk.rows = kMessageBytes / token;
  }
  return chunk;
}

}  // namespace weft
