// SPDX-License-Identifier: Apache-2.0
// Where everything of a dispatch between domains of GPUs lies: offsets into the
// network's staging, into the messages that the GPU packs, and into the GPU memory that calls work
// in.
#pragma once

#include <cstdint>
#include <vector>

#include "hosts/crossing_memory.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// Of one source that this rank carries, in GPU memory.
struct CarriedTokens {
  uint64_t rows = 0;
  uint64_t weights = 0;
  uint64_t scales = 0;
};

struct DispatchAreas {
  DispatchAreas() = default;
  // `tokens`: a row of each crossing token with its weights and scales, if any.
  DispatchAreas(const PlanData& plan, const CrossingChunk& tokens);

  // [carried sources]
  std::vector<uint64_t> staged;  // in staging
  std::vector<CarriedTokens> carried;
  // [num_domains], nothing for the own one
  std::vector<uint64_t> messages;
  std::vector<int64_t> chunks;  // number of the first message
  uint64_t own_weights = 0;     // by k, in GPU memory
  CrossingRoom room;            // all of it
};

}  // namespace weft
