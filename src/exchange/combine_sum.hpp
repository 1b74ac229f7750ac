// SPDX-License-Identifier: Apache-2.0
// The receiving role of combine: adds a token's partial sums in rank order as soon as the chunks
// that hold them are complete, and puts weight gradients back where the weights came from.
#pragma once

#include <atomic>

#include "exchange/chunk_signals.hpp"
#include "exchange/cpu_call.hpp"
#include "exchange/row_sum.hpp"

namespace weft {

class CombineSum {
 public:
  CombineSum(
      const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
  );

  // Memory of one worker.
  struct Scratch {
    RowGroups rows;
    RowGroups next_rows;
  };

  // Sums the next chunk of tokens if it is complete. Any worker. False: it was not.
  bool run_ready(Scratch& scratch);
  [[nodiscard]] bool is_claimed() const { return next_.load() >= num_units_; }
  // Until run_ready() has something to do or everything is claimed.
  void wait();
  // After all workers have ended.
  void settle() { arrived_.settle(); }
  void release_rows() const;

 private:
  void list_rows(int64_t token, RowGroups& groups) const;
  [[nodiscard]] float scale_of(const Arrivals& pair, int64_t token, size_t route) const;
  void give_weights(int64_t token) const;
  [[nodiscard]] int64_t chunks_needed(size_t peer, int64_t num_tokens) const;
  template <class Visit>
  void each_chunk(int64_t unit, const Visit& visit) const;
  [[nodiscard]] bool is_complete(int64_t unit) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  const CombineOutput& out_;
  size_t self_;
  size_t row_bytes_;
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here; else null
  ChunkSignals arrived_;
  int64_t num_units_;
  std::atomic<int64_t> next_ = 0;
};

}  // namespace weft
