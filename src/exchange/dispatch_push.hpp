// SPDX-License-Identifier: Apache-2.0
// The sending role of dispatch: rows of this rank's tokens, once to each rank that needs them.
#pragma once

#include <span>

#include "exchange/chunk.hpp"
#include "exchange/row_stream.hpp"

namespace weft {

class DispatchPush {
 public:
  DispatchPush(
      const CpuRank& rank,
      const CpuCall& call,
      std::span<const RowStream> streams,
      const ConstTensor& weights,
      const RowWeights& row_weights
  );

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // One chunk to every receiver, this rank last. Any worker, each unit once.
  void run(int64_t unit) const;

 private:
  void send(size_t to, int64_t chunk) const;
  void store(size_t to, ChunkRange range, const RowStream& stream) const;
  void keep(int64_t chunk) const;
  size_t gather_weights(const Arrivals& pair, int64_t first, int64_t last, float* out) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const float* weights_;  // null: none travel
  const RowWeights& row_weights_;
  size_t self_;
  int64_t num_units_ = 0;
};

}  // namespace weft
