// SPDX-License-Identifier: Apache-2.0
// The sending role of combine: sums an arrival's rows where the experts are and returns one row to
// the token's rank, or to the carrier that adds up this domain's, with the gradients of its
// weights.
#pragma once

#include <utility>
#include <vector>

#include "exchange/chunk.hpp"
#include "exchange/cpu_call.hpp"

namespace weft {

class CombineReduce {
 public:
  // Memory of one worker.
  struct Scratch {
    std::vector<std::byte> rows;  // a chunk that cannot be stored at the peer directly
    std::vector<float> weights;
    std::vector<const std::byte*> terms;
    std::vector<const std::byte*> next;
  };

  CombineReduce(const CpuRank& rank, const CpuCall& call, const CombineInput& in);

  // Collective, before any run(): kSourceWeights are held by the token ranks and used by the expert
  // ranks.
  void swap_source_weights();

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // One chunk for every token rank but this one, those of other domains first. Any worker, each
  // unit once.
  void run(int64_t unit, Scratch& scratch) const;
  // Until every token rank that reads rows here has done so: the caller may then change them.
  void wait_for_readers() const;

 private:
  // The partial sum of one arrival that came from `peer`, rounded to the dtype.
  void reduce(size_t peer, int64_t arrival, std::byte* out, Scratch& scratch) const;
  // Who takes the partial sums of a token rank's arrivals, and where in its area they begin.
  struct Taker {
    size_t rank;
    int64_t first_row;
    uint32_t first_signal;
    bool has_rows_itself;  // and needs no sums
  };
  [[nodiscard]] Taker taker_of(size_t peer) const;
  [[nodiscard]] bool reads_itself(size_t peer) const;
  void send_weights(size_t to, ChunkRange range, uint32_t signal, Scratch& scratch) const;
  [[nodiscard]] const float* scale_of(size_t peer, int64_t arrival) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t self_;
  size_t row_bytes_;
  std::vector<std::pair<size_t, Taker>> peers_;  // in the order of sending
  int64_t num_units_ = 0;
};

}  // namespace weft
