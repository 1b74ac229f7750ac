// SPDX-License-Identifier: Apache-2.0
// Bit-for-bit comparison that says where the first difference is.
#pragma once

#include <string>
#include <string_view>

#include "weft/plan.hpp"
#include "weft/tensor.hpp"

namespace weft::test {

// Empty if equal, else e.g. "rows: row 7, element 3 is 1.5 (0x3fc00000), expected 0 (0x0)".
[[nodiscard]] std::string first_difference(
    std::string_view what, const ConstTensor& actual, const ConstTensor& expected
);

// Like first_difference(), but any NaN equals any other: GPU and CPU sums agree in all other bits.
[[nodiscard]] std::string first_difference_but_nan(
    std::string_view what, const ConstTensor& actual, const ConstTensor& expected
);

// Empty if equal, else the first field of PlanData that differs.
[[nodiscard]] std::string first_difference(const Plan& actual, const Plan& expected);

}  // namespace weft::test
