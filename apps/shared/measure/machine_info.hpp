// SPDX-License-Identifier: Apache-2.0
// What this machine has, as the operating system tells it.
#pragma once

#include <nlohmann/json.hpp>

namespace weft::program {

// As `weft info --json` prints it under "machine"; keys that end in _bytes hold bytes. An unknown
// number is 0, an unknown text empty.
[[nodiscard]] nlohmann::ordered_json machine_info();

}  // namespace weft::program
