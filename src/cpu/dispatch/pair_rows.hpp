// SPDX-License-Identifier: Apache-2.0
// Rows of one chunk of a pair, from wherever they lie on this rank to wherever their receiver wants
// them.
#pragma once

#include <array>

#include "call/chunks.hpp"
#include "cpu/dispatch/row_stream.hpp"

namespace weft {

struct PairChunk {
  size_t to = 0;
  const Arrivals& pair;
  ChunkRange range;
  uint32_t signal = 0;    // of `to`
  int64_t first_row = 0;  // of the pair's arrival 0 in the area that `to` staged
};

// Puts that share a signal, sent together.
class PutList {
 public:
  void add(const Put& put) { puts_[num_puts_++] = put; }
  // Arrivals that this rank stored itself, each counted like one put.
  void add_stored(int64_t num_arrivals) { num_stored_ += static_cast<uint64_t>(num_arrivals); }

  void send(Transport& transport, size_t to, uint32_t signal) const {
    if (num_puts_ > 0) {
      transport.put(static_cast<int>(to), {puts_.data(), num_puts_});
    }
    if (num_stored_ > 0) {
      transport.raise(static_cast<int>(to), signal, num_stored_);
    }
  }

 private:
  std::array<Put, 2 * kChunkArrivals + 1> puts_;  // rows and scales, and the chunk's weights
  size_t num_puts_ = 0;
  uint64_t num_stored_ = 0;
};

// `row_of(i)`: where the row of arrival i lies here.
template <class RowOf>
void add_rows(
    PutList& puts,
    const CpuRank& rank,
    const CpuCall& call,
    const PairChunk& chunk,
    const RowStream& stream,
    const RowOf& row_of
) {
  const Target& target = call.words[chunk.to].*stream.target;
  if (target.place == Place::kEverySlot) {
    std::byte* const base =
        rank.transport.mapped(static_cast<int>(chunk.to), target.region.slot) + target.offset;
    stream.store_rows(base, chunk.pair, chunk.range, row_of);
    puts.add_stored(chunk.range.last - chunk.range.first);
    return;
  }
  const bool is_staged = target.place == Place::kStaging;
  for (int64_t i = chunk.range.first; i < chunk.range.last; ++i) {
    const int64_t row = is_staged ? chunk.first_row + i : chunk.pair.slots(i)[0];
    puts.add(put_to(target, row, row_of(i), stream.row_bytes, chunk.signal));
  }
}

}  // namespace weft
