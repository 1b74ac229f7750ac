// SPDX-License-Identifier: Apache-2.0
// Every provider of libfabric that needs no network card, also on a wire that delays and reorders.
#include "conformance/transport_conformance.hpp"

namespace weft::testing {
namespace {

// Processes take long to start; threads come in all sizes.
std::vector<TransportCase> processes(const std::string& transport) {
  std::vector<TransportCase> cases;
  for (const int num_ranks : {2, 4}) {
    cases.push_back({.transport = transport, .num_ranks = num_ranks, .launch = Launch::kProcesses});
  }
  return cases;
}

TransportCase late(const std::string& transport, int num_ranks, Launch launch) {
  return {
      .transport = transport, .num_ranks = num_ranks, .launch = launch, .refuses_at_once = false};
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(
    TcpThreads, TransportConformance, ::testing::ValuesIn(all_sizes("ofi:tcp")), case_name
);

INSTANTIATE_TEST_SUITE_P(
    TcpProcesses, TransportConformance, ::testing::ValuesIn(processes("ofi:tcp")), case_name
);

INSTANTIATE_TEST_SUITE_P(
    ShmThreads, TransportConformance, ::testing::ValuesIn(all_sizes("ofi:shm")), case_name
);

INSTANTIATE_TEST_SUITE_P(
    ShmProcesses, TransportConformance, ::testing::ValuesIn(processes("ofi:shm")), case_name
);

INSTANTIATE_TEST_SUITE_P(
    Faulty,
    TransportConformance,
    ::testing::Values(
        late("faulty:ofi:tcp?seed=1&delay=0.3&reorder=0.5", 3, Launch::kThreads),
        late("faulty:ofi:tcp?seed=2&delay=0.3&reorder=0.5", 2, Launch::kProcesses),
        late("faulty:ofi:shm?seed=3&delay=0.3&reorder=0.5", 2, Launch::kThreads),
        late("faulty:ofi:shm?seed=4&delay=0.3&reorder=0.5", 4, Launch::kProcesses)
    ),
    case_name
);

}  // namespace weft::testing
