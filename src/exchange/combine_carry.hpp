// SPDX-License-Identifier: Apache-2.0
// The carrying role of combine: adds, in rank order, what the ranks of this domain have for each
// token of another domain's rank, and sends it one row.
#pragma once

#include <atomic>
#include <vector>

#include "exchange/chunk_signals.hpp"
#include "exchange/cpu_call.hpp"
#include "exchange/row_sum.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

class CombineCarry {
 public:
  // Memory of one worker.
  struct Scratch {
    std::vector<std::byte> rows;  // a chunk that cannot be stored at the source directly
    RowGroups groups;
    RowGroups next;
  };

  CombineCarry(const CpuRank& rank, const CpuCall& call, const CombineInput& in);

  // Sends one chunk of each source whose partial sums are complete. Any worker. False: none was.
  bool run_ready(Scratch& scratch);
  // Every chunk is claimed by some worker.
  [[nodiscard]] bool is_claimed() const;
  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const;
  // Partial sums that some unclaimed chunk waits for.
  void add_missing(std::vector<Missing>& late) const;
  // After all workers have ended.
  void settle() { arrived_.settle(); }

 private:
  template <class Visit>
  void each_unclaimed(const Visit& visit) const;
  template <class Visit>
  void each_chunk(size_t carried, int64_t chunk, const Visit& visit) const;
  [[nodiscard]] bool is_complete(size_t carried, int64_t chunk) const;
  void run(const CarriedSource& carried, int64_t chunk, Scratch& scratch) const;
  void list(const CarriedSource& carried, int64_t crossing, RowGroups& groups) const;
  [[nodiscard]] float scale_of(int source, const Arrivals& pair, size_t route) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;
  std::vector<CarriedSource> const* carried_ = nullptr;  // null in a group of one domain
  std::vector<const std::byte*> rows_of_;   // by member, where its rows can be read here; else null
  ChunkSignals arrived_;                    // by pair (carried source, member)
  std::vector<std::atomic<int64_t>> next_;  // by carried source, first chunk nobody has claimed
};

}  // namespace weft
