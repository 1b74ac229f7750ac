// SPDX-License-Identifier: Apache-2.0
// Records travel: each source tells each receiver the slots of their pair. In a group of several
// domains a source tells its carrier there, in one message for all ranks of the domain; the carrier
// keeps a copy and passes each its own.
#pragma once

#include <span>
#include <vector>

#include "cpu/exchange.hpp"
#include "plan/build.hpp"

namespace weft {

struct SwappedRecords {
  std::vector<Arrivals> received;              // [num_ranks]
  std::vector<std::vector<Arrivals>> carried;  // [sources carried][members of this domain]
};

// Collective, part of a plan call. `receiver_rows`: of each rank's output, by rank; only needed
// where there are several domains. Throws Error (kTransport) for malformed records.
[[nodiscard]] SwappedRecords swap_records(
    CpuExchange& state,
    const PlanData& plan,
    std::span<const RankCounts> counts,
    std::span<const int64_t> receiver_rows
);

}  // namespace weft
