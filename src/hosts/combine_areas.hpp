// SPDX-License-Identifier: Apache-2.0
// Where everything of a combine between domains of GPUs lies: offsets into the
// network's staging, into the messages that the GPU packs, and into the GPU memory that calls work
// in.
#pragma once

#include <cstdint>
#include <vector>

#include "hosts/crossing_memory.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Of one source that this rank carries, in GPU memory.
struct CarriedSums {
  uint64_t rows = 0;
  uint64_t weights = 0;         // gradients that go back
  uint64_t source_weights = 0;  // that came
};

struct CombineAreas {
  CombineAreas() = default;
  // `sums`: a row, and its weight gradients if any, of each crossing token; `weights`: the weights
  // that go the other way before, if any.
  CombineAreas(const PlanData& plan, const CrossingChunk& sums, const CrossingChunk& weights);

  // [carried sources]
  std::vector<CarriedSums> carried;
  std::vector<uint64_t> staged_weights;  // in staging
  std::vector<uint64_t> sum_messages;
  std::vector<int64_t> sum_chunks;  // number of the first message
  // [num_domains], nothing for the own one
  std::vector<int64_t> first_part;    // row among the parts
  std::vector<uint64_t> staged_sums;  // in staging
  std::vector<uint64_t> weight_messages;
  std::vector<int64_t> weight_chunks;
  // In GPU memory: all parts (see CrossingArrays), their weights, and this rank's own by k.
  uint64_t parts = 0;
  uint64_t part_weights = 0;
  uint64_t own_weights = 0;
  CrossingRoom room;  // all of it
};

}  // namespace weft
