// SPDX-License-Identifier: Apache-2.0
// Domains of two and of four ranks on one machine, joined by every provider that needs no network
// card, also on a wire that delays and reorders. Ranks next to each other are neighbours at times
// and in different domains at others, so all tests meet both kinds of peer.
#include "conformance/transport_conformance.hpp"

namespace weft::testing {
namespace {

std::vector<TransportCase> all_domains(const std::string& transport, Launch launch) {
  std::vector<TransportCase> cases;
  for (const auto& [num_ranks, ranks_per_domain] : {std::pair(4, 2), {8, 2}, {8, 4}}) {
    cases.push_back(
        {.transport = transport,
         .num_ranks = num_ranks,
         .launch = launch,
         .ranks_per_domain = ranks_per_domain}
    );
  }
  return cases;
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
    ::testing::ValuesIn(all_domains("domains:tcp", Launch::kThreads)),
    case_name
);

INSTANTIATE_TEST_SUITE_P(
    TcpProcesses,
    TransportConformance,
    ::testing::ValuesIn(all_domains("domains:tcp", Launch::kProcesses)),
    case_name
);

INSTANTIATE_TEST_SUITE_P(
    ShmProcesses,
    TransportConformance,
    ::testing::ValuesIn(all_domains("domains:shm", Launch::kProcesses)),
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
