// SPDX-License-Identifier: Apache-2.0
// Membership in the calls of an exchange, for Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "calls.hpp"

namespace weft::py {

// Sets `function`, called with report()'s result by a thread that takes the interpreter's lock for
// that. Its errors go to sys.unraisablehook: the call is over by then, on all ranks, and its result
// is good.
void set_on_loss(ExchangeConfig& config, nb::callable function);

// (epoch, alive, lost, lost_experts, void_calls, calls_behind, is_repeated): CallReport.
[[nodiscard]] nb::tuple report(Calls& calls);

void mask(Calls& calls, const std::vector<int>& ranks);

[[nodiscard]] std::string invitation(Calls& calls);
void readmit(Calls& calls, const std::vector<int>& ranks);
bool grow(Calls& calls, int64_t max_tokens, int max_topk);

}  // namespace weft::py
