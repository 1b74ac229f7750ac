// SPDX-License-Identifier: Apache-2.0
// A plan on a GPU, for the executor that made it.
#pragma once

#include "core/check.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// The part of a plan on a GPU, as the executor that made it knows it. Throws Error
// (kInvalidArgument) for a plan of another executor.
template <class MadePlan>
[[nodiscard]] const MadePlan& device_plan_as(const PlanData& plan, const Context& context) {
  const auto* made = dynamic_cast<const MadePlan*>(plan.device.get());
  WEFT_CHECK_ARG(
      context, made != nullptr, "plan {} was made by another kind of exchange", plan.call
  );
  return *made;
}

}  // namespace weft
