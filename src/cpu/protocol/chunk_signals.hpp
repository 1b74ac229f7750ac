// SPDX-License-Identifier: Apache-2.0
// The chunk signals of one call: which number says that a chunk from a peer is complete. Signals
// are never reset; a call knows from its plan by how much each will grow, and settles the account
// when it is over.
#pragma once

#include <cstdint>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"

namespace weft {

// What a peer sends here in one call.
struct ChunkSource {
  int64_t num_arrivals = 0;  // 0 for this rank itself
  uint64_t puts_per_arrival = 1;
  int peer = 0;  // whom an error names when a chunk does not come (Missing)
  int via = -1;
};

// What one call lets arrive here.
struct ChunkTraffic {
  std::vector<ChunkSource> sources = {};
  uint64_t puts_per_chunk = 0;  // on top, e.g. one for all weights of a chunk
};

class ChunkSignals {
 public:
  // `first_signal` is that of (source 0, chunk 0); sources follow each other at `max_chunks`.
  ChunkSignals(const CpuRank& rank, uint32_t first_signal, ChunkTraffic traffic)
      : transport_(rank.transport),
        first_signal_(first_signal),
        max_chunks_(rank.signals.max_chunks),
        traffic_(std::move(traffic)),
        settled_(rank.settled) {}

  [[nodiscard]] size_t num_peers() const { return traffic_.sources.size(); }
  [[nodiscard]] int64_t num_arrivals(size_t peer) const {
    return traffic_.sources[peer].num_arrivals;
  }
  [[nodiscard]] int64_t num_chunks_from(size_t peer) const {
    return num_chunks(num_arrivals(peer));
  }
  // Raised at each receiver for the chunks that `rank` sends.
  [[nodiscard]] uint32_t signal(size_t rank, int64_t chunk) const {
    return first_signal_ + static_cast<uint32_t>(rank) * max_chunks_ + static_cast<uint32_t>(chunk);
  }
  [[nodiscard]] uint64_t wanted(size_t peer, int64_t chunk) const {
    const ChunkRange range = chunk_range(num_arrivals(peer), chunk);
    return settled_[signal(peer, chunk)] + traffic_.puts_per_chunk +
           static_cast<uint64_t>(range.last - range.first) *
               traffic_.sources[peer].puts_per_arrival;
  }
  // Acquires what the chunk's puts wrote.
  [[nodiscard]] bool is_complete(size_t peer, int64_t chunk) const {
    return transport_.signal_value(signal(peer, chunk)) >= wanted(peer, chunk);
  }
  [[nodiscard]] Missing missing(size_t peer, int64_t chunk) const {
    const uint32_t number = signal(peer, chunk);
    return {
        .peer = traffic_.sources[peer].peer,
        .signal = number,
        .seen = transport_.signal_value(number),
        .wanted = wanted(peer, chunk),
        .via = traffic_.sources[peer].via};
  }
  // One thread calls it after all chunks are complete.
  void settle() {
    for (size_t peer = 0; peer < num_peers(); ++peer) {
      for (int64_t chunk = 0; chunk < num_chunks_from(peer); ++chunk) {
        settled_[signal(peer, chunk)] = wanted(peer, chunk);
      }
    }
  }

 private:
  const Transport& transport_;
  uint32_t first_signal_;
  uint32_t max_chunks_;
  ChunkTraffic traffic_;
  std::vector<uint64_t>& settled_;
};

}  // namespace weft
