// SPDX-License-Identifier: Apache-2.0
// Offsets of the areas that a call between domains uses, taken one after the other, aligned; and
// how much all of them may need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call/chunks.hpp"
#include "cpu/protocol/region_map.hpp"
#include "hosts/crossing_chunk.hpp"

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

// Of one call, or of any.
struct CrossingRoom {
  uint64_t staging = 0;       // bytes that peers write
  uint64_t messages = 0;      // bytes that the GPU packs
  uint64_t work = 0;          // bytes in the GPU's memory
  uint64_t num_messages = 0;  // that the GPU packs

  [[nodiscard]] constexpr bool holds(const CrossingRoom& call) const {
    return call.staging <= staging && call.messages <= messages && call.work <= work &&
           call.num_messages <= num_messages;
  }
};

// What decides it.
struct CrossingBounds {
  uint64_t num_others = 0;   // domains
  uint64_t num_carried = 0;  // sources
  int64_t max_tokens = 0;    // of each rank
  int max_topk = 0;
  int64_t token_bytes = 0;  // that cross with a token: there in a dispatch, both ways in a combine
};

// Enough for any dispatch or combine. A token crosses to every other domain or to as many as it has
// experts, whichever is less; all tokens of a carried source may cross to its carrier. What goes
// one way in dispatch comes back in combine, so of what the network touches the larger part is
// needed once.
[[nodiscard]] constexpr CrossingRoom crossing_room(const CrossingBounds& bounds) {
  const auto tokens = static_cast<uint64_t>(std::max<int64_t>(bounds.max_tokens, 1));
  const auto bytes = tokens * static_cast<uint64_t>(bounds.token_bytes);
  const auto chunks = static_cast<uint64_t>(num_chunks(bounds.max_tokens)) + 1;
  const uint64_t crossed =
      std::min<uint64_t>(bounds.num_others, static_cast<uint64_t>(std::max(bounds.max_topk, 1)));
  const uint64_t peers = bounds.num_others + bounds.num_carried;
  const uint64_t gaps = (peers + 1) * (chunks * 64 + AreaMap::kAlignment);  // see stride()
  const uint64_t host = std::max(crossed, bounds.num_carried) * bytes + gaps;
  return {
      .staging = host,
      .messages = host,
      .work = (crossed + bounds.num_carried + 2) * bytes + 3 * (peers + 1) * AreaMap::kAlignment,
      .num_messages = peers * chunks};
}

}  // namespace weft
