// SPDX-License-Identifier: Apache-2.0
// The carrying role of dispatch: rows that other domains sent to this rank go on to the ranks of
// its domain, chunk by chunk, as the source itself would send them there.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "exchange/chunk_signals.hpp"
#include "exchange/row_stream.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class DispatchCarry {
 public:
  DispatchCarry(const CpuRank& rank, const CpuCall& call, std::span<const RowStream> streams);

  // Hands on one chunk of each pair whose rows have come. Any worker. False: there was none.
  bool run_ready();
  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const;
  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const;
  // Chunks that some unclaimed chunk of a pair waits for.
  void add_missing(std::vector<Missing>& late) const;
  // After all workers have ended.
  void settle() { crossed_.settle(); }

 private:
  struct Pair {
    const CarriedSource& carried;
    size_t member;
    const Arrivals& arrivals;
  };

  template <class Visit>
  void each_unclaimed(const Visit& visit) const;
  // Chunks of crossing tokens that a chunk of a pair needs, the last one included.
  [[nodiscard]] ChunkRange chunks_needed(const Pair& pair, int64_t chunk) const;
  [[nodiscard]] bool is_complete(const Pair& pair, int64_t chunk) const;
  void run(const Pair& pair, int64_t chunk) const;
  void send(size_t to, const Pair& pair, int64_t chunk) const;
  void keep(const Pair& pair, int64_t chunk) const;
  [[nodiscard]] const std::byte* row(const RowStream& stream, const Pair& pair, int64_t i) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  ChunkSignals crossed_;
  std::vector<Pair> pairs_;
  std::vector<std::atomic<int64_t>> next_;  // by pair, first chunk nobody has claimed
};

}  // namespace weft
