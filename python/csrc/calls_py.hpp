// SPDX-License-Identifier: Apache-2.0
// What Python's Exchange holds. Calls run without the interpreter's lock and one at a time: forward
// and backward may come from different threads.
#pragma once

#include <mutex>
#include <nanobind/nanobind.h>
#include <optional>

#include "weft/error.hpp"
#include "weft/exchange.hpp"

namespace weft::py {

namespace nb = nanobind;

class Calls {
 public:
  Calls(const Group& group, const ExchangeConfig& config) : exchange_(group, config) {}

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }

  // Arguments that cannot even be viewed are refused on all ranks too.
  template <class Build, class Run>
  auto call(Op op, const CallOptions& options, const Build& build, const Run& run) {
    using Arguments = decltype(build());
    std::optional<Arguments> arguments;
    try {
      arguments.emplace(build());
    } catch (const Error& error) {
      locked([&](Exchange& exchange) { exchange.refuse(op, error.what(), options); });
      throw;
    }
    return locked([&](Exchange& exchange) { return run(exchange, *arguments); });
  }

  template <class Body>
  auto locked(const Body& body) {
    const nb::gil_scoped_release no_gil;
    return locked_here(body);
  }

  // For a thread that does not hold the interpreter's lock, or keeps it.
  template <class Body>
  auto locked_here(const Body& body) {
    const std::scoped_lock lock(mutex_);
    return body(exchange_);
  }

 private:
  std::mutex mutex_;
  Exchange exchange_;
};

}  // namespace weft::py
