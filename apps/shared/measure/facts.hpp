// SPDX-License-Identifier: Apache-2.0
// What is known about this build, and what this machine has as the operating system tells it: as
// `weft info --json` prints it. Keys that end in _bytes hold bytes; an unknown number is 0, an
// unknown text empty.
#pragma once

#include <nlohmann/json.hpp>

namespace weft::program {

[[nodiscard]] nlohmann::ordered_json build_info();
[[nodiscard]] nlohmann::ordered_json machine_info();

}  // namespace weft::program
