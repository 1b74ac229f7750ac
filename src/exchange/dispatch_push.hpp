// SPDX-License-Identifier: Apache-2.0
// The sending role of dispatch: rows of this rank's tokens, once to each rank of its domain that
// needs them and once to its carrier in each other domain.
#pragma once

#include <span>

#include "exchange/pair_rows.hpp"

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
  // One chunk to every receiver, other domains first, this rank last. Any worker, each unit once.
  void run(int64_t unit) const;

 private:
  void send(size_t to, int64_t chunk) const;
  void send_across(size_t domain, int64_t chunk) const;
  void send_weights(size_t to, int64_t chunk) const;
  void keep(int64_t chunk) const;
  [[nodiscard]] Put weights_put(
      size_t to, ChunkRange range, uint32_t signal, std::span<float> memory
  ) const;
  size_t gather_weights(const Arrivals& pair, int64_t first, int64_t last, float* out) const;

  const CpuRank& rank_;
  const CpuCall& call_;
  const PlanData& plan_;
  std::span<const RowStream> streams_;
  const float* weights_;  // null: none travel
  const RowWeights& row_weights_;
  size_t self_;
  std::vector<size_t> near_;     // ranks of this domain, from the one after this rank on
  std::vector<size_t> far_;      // ranks of other domains, likewise
  std::vector<size_t> domains_;  // other domains, likewise
  int64_t num_units_ = 0;
};

}  // namespace weft
