// SPDX-License-Identifier: Apache-2.0
// The receiving role of combine: adds a token's partial sums in rank order, and those of other
// domains in domain order, as soon as the chunks that hold them are complete, and puts weight
// gradients back where the weights came from.
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
  struct Token {
    RowGroups rows;
    RowGroups near;                   // of this domain, where it is one of several
    std::vector<std::byte> near_sum;  // of those
  };
  struct Scratch {
    Token now;
    Token next;
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
  void list(int64_t token, Token& out) const;
  void list_across(int64_t token, Token& out) const;
  // Rows of the token's arrivals, a group for each.
  template <class Filter>
  void list_arrivals(int64_t token, RowGroups& groups, const Filter& is_wanted) const;
  void add_row(const std::byte* row, RowGroups& groups) const;
  [[nodiscard]] float scale_of(const Arrivals& pair, int64_t token, size_t route) const;
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
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here; else null
  ChunkSignals arrived_;  // by rank: partial sums of this domain's ranks, weights of all
  ChunkSignals crossed_;  // by carrier: sums of its domain
  int64_t num_units_;
  std::atomic<int64_t> next_ = 0;
};

}  // namespace weft
