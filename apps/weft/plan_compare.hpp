// SPDX-License-Identifier: Apache-2.0
// How two plans differ.
#pragma once

#include <string>
#include <vector>

#include "weft/plan.hpp"

namespace weft::program {

// One line per field that differs, with the first place and both values; empty if the plans are
// equal.
[[nodiscard]] std::vector<std::string> plan_differences(const Plan& a, const Plan& b);

}  // namespace weft::program
