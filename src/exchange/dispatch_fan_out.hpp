// SPDX-License-Identifier: Apache-2.0
// The receiving role of dispatch: each arrival to its other slots (or all of them, out of staging)
// as soon as its chunk is complete, while it is still in cache.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "exchange/chunk_signals.hpp"
#include "exchange/row_stream.hpp"

namespace weft {

class DispatchFanOut {
 public:
  DispatchFanOut(
      const CpuRank& rank,
      const CpuCall& call,
      std::span<const RowStream> streams,
      const RowWeights& row_weights
  );

  // Fans out one complete chunk of each source that has one. Any worker. False: there was none.
  bool run_ready();
  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const;
  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const;
  // Chunks that nobody has claimed and that have not come.
  void add_missing(std::vector<Missing>& late) const;
  // After all workers have ended.
  void settle() { arrived_.settle(); }

 private:
  template <class Visit>
  void each_unclaimed(const Visit& visit) const;
  bool run_next(size_t source);
  void run(size_t source, int64_t chunk) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const RowWeights& row_weights_;
  ChunkSignals arrived_;
  std::vector<bool> is_carried_;  // by source: its rows come by DispatchCarry, its weights here
  std::vector<std::atomic<int64_t>> next_;  // by source, first chunk nobody has claimed
};

}  // namespace weft
