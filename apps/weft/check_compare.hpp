// SPDX-License-Identifier: Apache-2.0
// Bit-for-bit comparison that can say where a first difference lies.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "plan/plan_data.hpp"
#include "weft/tensor.hpp"

namespace weft::program {

// "slot 7 (rank 1, token 5, k 2)", or what else the row is for.
[[nodiscard]] std::string slot_text(const PlanData& plan, int64_t slot);

// Both are contiguous and of one dtype. `row_text` names a row.
[[nodiscard]] std::optional<std::string> first_difference(
    std::string_view what,
    const ConstTensor& actual,
    const ConstTensor& expected,
    const std::function<std::string(int64_t)>& row_text
);

}  // namespace weft::program
