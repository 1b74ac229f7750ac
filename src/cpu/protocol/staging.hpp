// SPDX-License-Identifier: Apache-2.0
// Places in this rank's staging region where each peer writes during one call. They are derived
// only from the plan.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/protocol/region_map.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// Offsets by peer; this rank's own entries are unused. A kind of zero bytes does not travel or goes
// straight to its slots. In a group of several domains, rows and scales that a forwarder hands on
// lie in its area (plan/domain_traffic.hpp).
struct Staging {
  std::vector<uint64_t> rows;
  std::vector<uint64_t> scales;
  std::vector<uint64_t> weights;
  std::vector<uint64_t> source_weights;
  // Inter-node tokens: in dispatch by the source that this rank forwards for, in combine by
  // forwarder.
  std::vector<uint64_t> crossing_rows;
  std::vector<uint64_t> crossing_scales;
  uint64_t num_bytes = 0;
};

// Bytes of one row of each kind, 0 where that kind needs no staging.
struct StagedRowBytes {
  uint64_t rows = 0;
  uint64_t scales = 0;
  uint64_t weights = 0;         // of one route
  uint64_t source_weights = 0;  // of one route
  uint64_t crossing_rows = 0;
  uint64_t crossing_scales = 0;
};

// Lays out by source what dispatch brings here, perhaps through a forwarder.
[[nodiscard]] Staging dispatch_staging(const PlanData& plan, const StagedRowBytes& bytes);
// Lays out by expert rank what combine returns; source_weights by token rank.
[[nodiscard]] Staging combine_staging(const PlanData& plan, const StagedRowBytes& bytes);

}  // namespace weft
