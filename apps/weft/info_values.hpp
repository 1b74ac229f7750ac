// SPDX-License-Identifier: Apache-2.0
// All that `weft info` knows, as one JSON value. Keys that end in _bytes hold bytes.
#pragma once

#include <nlohmann/json.hpp>

namespace weft::program {

// Forks two processes to try the transports: call before starting threads.
[[nodiscard]] nlohmann::ordered_json info_values();

// What libfabric offers on this host, which provider is chosen and why.
[[nodiscard]] nlohmann::ordered_json fabric_values();

}  // namespace weft::program
