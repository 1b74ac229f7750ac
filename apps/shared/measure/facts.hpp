// SPDX-License-Identifier: Apache-2.0
// Facts about this build, and about this machine as the operating system tells them, in the form
// that `weft info --json` prints. Keys that end in _bytes hold bytes; an unknown number is 0, an
// unknown text empty.
#pragma once

#include <nlohmann/json.hpp>

namespace weft::program {

[[nodiscard]] nlohmann::ordered_json build_info();
[[nodiscard]] nlohmann::ordered_json machine_info();

}  // namespace weft::program
