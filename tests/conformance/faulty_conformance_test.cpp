// SPDX-License-Identifier: Apache-2.0
// A wire that delays and reorders keeps every promise of the interface.
#include "conformance/transport_conformance.hpp"

namespace weft::testing {
namespace {

TransportCase late(const std::string& transport, int num_ranks, Launch launch) {
  return {
      .transport = transport, .num_ranks = num_ranks, .launch = launch, .refuses_at_once = false};
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(
    Faulty,
    TransportConformance,
    ::testing::Values(
        late("faulty:loopback?seed=1&delay=0.3&reorder=0.5", 1, Launch::kThreads),
        late("faulty:loopback?seed=2&delay=0.3&reorder=0.5&hide_mapped=1", 3, Launch::kThreads),
        late("faulty:shm?seed=3&delay=0.3&reorder=0.5", 2, Launch::kThreads),
        late("faulty:shm?seed=4&delay=0.3&reorder=0.5&hide_mapped=1", 4, Launch::kProcesses)
    ),
    case_name
);

}  // namespace weft::testing
