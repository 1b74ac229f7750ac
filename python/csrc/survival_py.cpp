// SPDX-License-Identifier: Apache-2.0
#include "survival_py.hpp"

#include <nanobind/stl/vector.h>
#include <utility>

namespace weft::py {
namespace {

nb::tuple tuple_of(const CallReport& report) {
  return nb::make_tuple(
      report.epoch,
      report.alive,
      report.lost,
      report.lost_experts,
      report.void_calls,
      report.calls_behind,
      report.is_repeated
  );
}

}  // namespace

void set_on_loss(ExchangeConfig& config, nb::callable function) {
  config.on_loss = [held = held_of(std::move(function))](const CallReport& report) {
    const nb::gil_scoped_acquire gil;
    try {
      (*held)(*tuple_of(report));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(*held);
    }
  };
}

nb::tuple report(Calls& calls) {
  return tuple_of(calls.asked([](Exchange& exchange) { return exchange.report(); }));
}

void mask(Calls& calls, const std::vector<int>& ranks) {
  calls.locked([&](Exchange& exchange) { exchange.mask(ranks); });
}

std::string invitation(Calls& calls) {
  return calls.locked([](Exchange& exchange) { return exchange.invitation(); });
}

void readmit(Calls& calls, const std::vector<int>& ranks) {
  calls.locked([&](Exchange& exchange) { exchange.readmit(ranks); });
}

bool grow(Calls& calls, int64_t max_tokens, int max_topk) {
  return calls.locked([&](Exchange& exchange) { return exchange.grow(max_tokens, max_topk); });
}

}  // namespace weft::py
