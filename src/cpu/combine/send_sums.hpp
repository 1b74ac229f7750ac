// SPDX-License-Identifier: Apache-2.0
// One chunk of sums that this rank makes for a peer: in the peer's memory where it can be stored
// to, else here, and then they are put.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"
#include "cpu/combine/row_sum.hpp"

namespace weft {

struct SumChunk {
  size_t to = 0;          // rank
  int64_t first_row = 0;  // of the chunk in the area that `to` named in its word
  int64_t num_rows = 0;
  uint32_t signal = 0;  // of `to`; grows by num_rows
};

// Memory of one worker, in cache lines of its own.
struct alignas(64) SumScratch {
  std::vector<std::byte> rows;  // a chunk that cannot be stored at the peer directly
  std::vector<float> weights;
  RowGroups now;
  RowGroups next;
};

// `list(i, groups)` adds what row i of the chunk is the sum of to `groups`, which are empty.
template <class List>
void send_sums(
    const CpuRank& rank,
    const CpuCall& call,
    const CombineInput& in,
    const SumChunk& chunk,
    SumScratch& scratch,
    const List& list
) {
  const int to = static_cast<int>(chunk.to);
  const auto row_bytes = static_cast<size_t>(in.rows.row_bytes());
  const Target& target = call.words[chunk.to].rows;
  std::byte* const peer_memory = rank.transport.mapped(to, target.region.slot);
  std::byte* rows = peer_memory;
  if (peer_memory != nullptr) {
    rows += target.offset + static_cast<uint64_t>(chunk.first_row) * row_bytes;
  } else {
    scratch.rows.resize(static_cast<size_t>(kChunkArrivals) * row_bytes);
    rows = scratch.rows.data();
  }
  std::array<Put, kChunkArrivals> puts;
  scratch.next.clear();
  list(0, scratch.next);
  for (int64_t i = 0; i < chunk.num_rows; ++i) {
    std::swap(scratch.now, scratch.next);
    scratch.next.clear();
    if (i + 1 < chunk.num_rows) {
      list(i + 1, scratch.next);
    }
    std::byte* const row = rows + static_cast<size_t>(i) * row_bytes;
    sum_groups(row, scratch.now, in.rows.dtype, in.rows.cols, scratch.next.rows);
    puts[static_cast<size_t>(i)] =
        put_to(target, chunk.first_row + i, row, row_bytes, chunk.signal);
  }
  const auto count = static_cast<size_t>(chunk.num_rows);
  if (peer_memory != nullptr) {
    rank.transport.raise(to, chunk.signal, count);
  } else {
    rank.transport.put(to, {puts.data(), count});
  }
}

}  // namespace weft
