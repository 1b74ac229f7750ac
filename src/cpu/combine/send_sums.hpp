// SPDX-License-Identifier: Apache-2.0
// One chunk of rows that this rank makes for a peer: in the peer's memory where it can be stored
// to, else here, and then they are put.
#pragma once

#include <array>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"

namespace weft {

struct SumChunk {
  size_t to = 0;          // rank
  int64_t first_row = 0;  // of the chunk in the area that `to` named in its word
  int64_t num_rows = 0;
  size_t row_bytes = 0;
  uint32_t signal = 0;  // of `to`; grows by num_rows
};

// `make_row(i, row)` writes row i of the chunk. `scratch` is the calling worker's.
template <class MakeRow>
void send_sums(
    const CpuRank& rank,
    const CpuCall& call,
    const SumChunk& chunk,
    std::vector<std::byte>& scratch,
    const MakeRow& make_row
) {
  const int to = static_cast<int>(chunk.to);
  const auto count = static_cast<size_t>(chunk.num_rows);
  const Target& target = call.words[chunk.to].rows;
  const uint64_t offset = target.offset + static_cast<uint64_t>(chunk.first_row) * chunk.row_bytes;
  std::byte* const peer_memory = rank.transport.mapped(to, target.region.slot);
  std::byte* rows = peer_memory;
  if (peer_memory != nullptr) {
    rows += offset;
  } else {
    scratch.resize(static_cast<size_t>(kChunkArrivals) * chunk.row_bytes);
    rows = scratch.data();
  }
  for (size_t i = 0; i < count; ++i) {
    make_row(static_cast<int64_t>(i), rows + i * chunk.row_bytes);
  }
  if (peer_memory != nullptr) {
    rank.transport.raise(to, chunk.signal, count);
    return;
  }
  std::array<Put, kChunkArrivals> puts;
  for (size_t i = 0; i < count; ++i) {
    puts[i] = {
        .source = rows + i * chunk.row_bytes,
        .bytes = chunk.row_bytes,
        .region = target.region.slot,
        .signal = chunk.signal,
        .offset = offset + i * chunk.row_bytes};
  }
  rank.transport.put(to, {puts.data(), count});
}

}  // namespace weft
