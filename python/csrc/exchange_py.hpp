// SPDX-License-Identifier: Apache-2.0
// Calls of which at_once_py.cpp makes those of weft/compat: exchange_py.cpp has them, and other
// files what is made of a routing and of a plan.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "tensors_py.hpp"
#include "weft/plan.hpp"

namespace weft::py {

// Methods of _core.Exchange.
void bind_at_once(nb::class_<Calls>& exchange);

// sent: x, weights, scales; memory for sources, counts, count_sums; then global_scale.
[[nodiscard]] nb::tuple dispatch(
    Calls& calls,
    const Plan& plan,
    const nb::tuple& sent,
    bool has_experts,
    const Options& options,
    nb::handle pool
);

// How a dispatch is made whose plan is still to be made.
struct Routed {
  nb::handle pool_of;                 // returns the pool for the rows of this exchange, or is None
  std::optional<int64_t> given_rows;  // their number, if known beforehand
  bool is_one_call;                   // all ranks make both by the call that does
};

// The plan; what the dispatch threw, if the plan was good (what the plan throws is thrown); and
// what `dispatch` returns, or None if that is still to be called.
[[nodiscard]] nb::tuple plan_and_dispatch(
    Calls& calls,
    const RoutingGiven& routes,
    const SentGiven& given,
    const Options& options,
    const Routed& how
);

// brought: rows, row_weights, source_weights, source_idx, marks. out: memory for the tokens, or
// None.
[[nodiscard]] nb::tuple combine(
    Calls& calls, const Plan& plan, const nb::tuple& brought, nb::handle out, const Options& options
);

// Local: the map bool [T, E], and the weights fp32 [T, E] or None, of topk_idx [T, K] and weights.
[[nodiscard]] nb::tuple spread_routing(
    nb::handle topk_idx, nb::handle weights, int64_t num_experts, uintptr_t stream
);

// Local: int64 on the CPU, a copy. made: such memory, or None.
[[nodiscard]] nb::object tensor_of(std::span<const int64_t> values, nb::handle made);

}  // namespace weft::py
