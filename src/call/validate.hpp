// SPDX-License-Identifier: Apache-2.0
// Every check of the caller's arguments, in one place. All throw Error (kInvalidArgument or
// kUnsupported) before anything is written.
#pragma once

#include <functional>
#include <span>

#include "core/check.hpp"
#include "plan/plan_data.hpp"
#include "weft/exchange.hpp"

namespace weft {

void validate_config(const ExchangeConfig& config, const Context& context);

// Checks what Exchange::mask() is given.
void check_masked(std::span<const int> ranks, const Context& context);
// Throws Error (kUnsupported) for an Exchange::grow() that cannot be.
[[noreturn]] void refuse_to_grow(const ExchangeConfig& config, const Context& context);

// Collective. Throws on all ranks if a config is wrong, or different on one. `more_checks` may
// throw what only the chosen executor knows.
void agree_on_config(
    const Group& group, const ExchangeConfig& config, const std::function<void()>& more_checks = {}
);

// Checks of arguments by one exchange, which accepts its own plans only, within its limits.
struct Validator {
  Context context;
  const ExchangeConfig& config;
  uint64_t exchange_id = 0;

  void dispatch(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out) const;
  void combine(const PlanData& plan, const CombineInput& in, const CombineOutput& out) const;

 private:
  void quantised(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out) const;
  void wire(const PlanData& plan, const CombineInput& in) const;
  // Checks the optional outputs: all but rows, weights and scales.
  void beside(const PlanData& plan, const DispatchOutput& out) const;
  void marks(const PlanData& plan, const RowMarks& ready) const;
};

}  // namespace weft
