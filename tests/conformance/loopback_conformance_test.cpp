// SPDX-License-Identifier: Apache-2.0
#include "conformance/transport_conformance.hpp"

namespace weft::testing {

INSTANTIATE_TEST_SUITE_P(
    Loopback, TransportConformance, ::testing::ValuesIn(all_sizes("loopback")), case_name
);

}  // namespace weft::testing
