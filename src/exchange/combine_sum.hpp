// SPDX-License-Identifier: Apache-2.0
// The receiving role of combine: adds a token's partial sums in rank order, and those of other
// domains in domain order, as soon as the chunks that hold them are complete, and puts weight
// gradients back where the weights came from.
#pragma once

#include <atomic>

#include "exchange/chunk_signals.hpp"
#include "exchange/combine_rows.hpp"
#include "exchange/cpu_call.hpp"

namespace weft {

class CombineSum {
 public:
  CombineSum(
      const CpuRank& rank, const CpuCall& call, const CombineInput& in, const CombineOutput& out
  );

  // Memory of one worker.
  struct Scratch {
    CombineRows::Token now;
    CombineRows::Token next;
  };

  // Sums the next chunk of tokens if it is complete. Any worker. False: it was not.
  bool run_ready(Scratch& scratch);
  [[nodiscard]] bool is_claimed() const { return next_.load() >= num_units_; }
  // run_ready() has something to do.
  [[nodiscard]] bool has_ready() const;
  // What the next chunk of tokens waits for.
  void add_missing(std::vector<Missing>& late) const;
  // After all workers have ended.
  void settle() {
    arrived_.settle();
    crossed_.settle();
  }
  void release_rows() const;

 private:
  void give_weights(int64_t token) const;
  // Visits (signals, peer, chunk) of all partial sums that a unit reads, until `visit` returns
  // false.
  template <class Visit>
  void each_chunk(int64_t unit, const Visit& visit) const;
  template <class Visit>
  [[nodiscard]] bool each_chunk_of(
      const ChunkSignals& signals,
      size_t peer,
      std::span<const int32_t> tokens,
      int64_t unit,
      const Visit& visit
  ) const;
  [[nodiscard]] bool is_complete(int64_t unit) const;
  void add_behind(bool is_carrier, Missing carrier, std::vector<Missing>& late) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  const CombineOutput& out_;
  size_t self_;
  size_t row_bytes_;
  bool has_weights_;
  CombineRows rows_;
  ChunkSignals arrived_;  // by rank: partial sums of this domain's ranks, weights of all
  ChunkSignals crossed_;  // by carrier: sums of its domain
  int64_t num_units_;
  std::atomic<int64_t> next_ = 0;
};

}  // namespace weft
