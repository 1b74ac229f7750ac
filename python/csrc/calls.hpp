// SPDX-License-Identifier: Apache-2.0
// An exchange as Python holds it: calls without the interpreter's lock, one at a time, which Ctrl-C
// can interrupt.
#pragma once

#include <cstdint>
#include <mutex>

#include "bind.hpp"
#include "core/interrupt.hpp"
#include "weft/exchange.hpp"

namespace weft::py {

// Calls of this thread that all ranks make. What fails in Python before one has begun is refused.
inline thread_local int64_t num_begun = 0;
inline thread_local int64_t num_refused = 0;

// Signals are for the main thread: no other need ask, nor take the interpreter's lock for that.
struct MainThread {
  unsigned long id =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")
      );
};
inline bool is_main_thread() {
  return PyThread_get_thread_ident() == looked_up<MainThread>().id;
}

// Whether a handler of Python's has raised: KeyboardInterrupt, or what one for SIGTERM does.
inline bool has_signal() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// What Python's Exchange holds. Calls run without the interpreter's lock and one at a time: forward
// and backward may come from different threads.
class Calls {
 public:
  Calls(const Group& group, const ExchangeConfig& config) : exchange_(group, config) {}

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }

  template <class Body>
  auto locked(const Body& body) {
    const InterruptScope scope(is_main_thread() ? &has_signal : nullptr);
    const nb::gil_scoped_release no_gil;
    return locked_here(body);
  }

  // For a call that all ranks make.
  template <class Body>
  auto begin(const Body& body) {
    ++num_begun;
    return locked(body);
  }

  // What the last plan took that told the number of its rows, for the memory of the next; -1
  // before.
  int64_t last_rows = -1;
  // How many more the next may need: none while their number stays.
  int64_t spare_rows = 0;

  // For a thread that does not hold the interpreter's lock, or keeps it.
  template <class Body>
  auto locked_here(const Body& body) {
    const std::scoped_lock lock(mutex_);
    return body(exchange_);
  }

 private:
  std::recursive_mutex mutex_;  // ExchangeConfig::on_loss may ask for the report
  Exchange exchange_;
};

}  // namespace weft::py
