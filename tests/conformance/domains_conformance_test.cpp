// SPDX-License-Identifier: Apache-2.0
// Domains of two and of four ranks on one machine, joined by every provider that needs no network
// card, also on a wire that delays and reorders. Ranks next to each other are neighbours at times
// and in different domains at others, so all tests meet both kinds of peer.
#include "conformance/transport_conformance.hpp"

namespace weft::testing {
namespace {

TransportCase divided(
    const std::string& transport, Launch launch, int num_ranks, int ranks_per_domain
) {
  return {
      .transport = transport,
      .num_ranks = num_ranks,
      .launch = launch,
      .ranks_per_domain = ranks_per_domain};
}

TransportCase late(const std::string& transport, Launch launch) {
  return {
      .transport = transport,
      .num_ranks = 4,
      .launch = launch,
      .refuses_at_once = false,
      .ranks_per_domain = 2};
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(
    TcpThreads,
    TransportConformance,
    ::testing::Values(
        divided("domains:tcp", Launch::kThreads, 4, 2),
        divided("domains:tcp", Launch::kThreads, 8, 2),
        divided("domains:tcp", Launch::kThreads, 8, 4)
    ),
    case_name
);

INSTANTIATE_TEST_SUITE_P(
    TcpProcesses,
    TransportConformance,
    ::testing::Values(
        divided("domains:tcp", Launch::kProcesses, 4, 2),
        divided("domains:tcp", Launch::kProcesses, 8, 4)
    ),
    case_name
);

INSTANTIATE_TEST_SUITE_P(
    ShmProcesses,
    TransportConformance,
    ::testing::Values(divided("domains:shm", Launch::kProcesses, 4, 2)),
    case_name
);

INSTANTIATE_TEST_SUITE_P(
    Faulty,
    TransportConformance,
    ::testing::Values(
        late("faulty:domains:tcp?seed=1&delay=0.3&reorder=0.5", Launch::kThreads),
        late("faulty:domains:tcp?seed=2&delay=0.3&reorder=0.5", Launch::kProcesses),
        late("faulty:domains:tcp?seed=3&delay=0.3&hide_mapped=1", Launch::kProcesses)
    ),
    case_name
);

}  // namespace weft::testing
