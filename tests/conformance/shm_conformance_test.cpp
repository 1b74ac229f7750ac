// SPDX-License-Identifier: Apache-2.0
#include "conformance/transport_conformance.hpp"

namespace weft::testing {

INSTANTIATE_TEST_SUITE_P(
    ShmThreads, TransportConformance, ::testing::ValuesIn(all_sizes("shm")), case_name
);

INSTANTIATE_TEST_SUITE_P(
    ShmProcesses,
    TransportConformance,
    ::testing::ValuesIn(all_sizes("shm", Launch::kProcesses)),
    case_name
);

}  // namespace weft::testing
