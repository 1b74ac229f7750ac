// SPDX-License-Identifier: Apache-2.0
// How a call that waits is interrupted (Ctrl-C): by a check that belongs to the calling thread.
//
// The caller sets the check for the time of a call; every wait on the calling thread asks it, at
// the latest every 50 ms, and throws Error (kInterrupted) once it says yes:
//
//   const InterruptScope scope(&has_signal);  // bool has_signal(): the user wants to stop
//   exchange.dispatch(plan, in, out);
//
// On CPUs that wait is cpu/protocol/waiter.cpp; a host that waits for a GPU asks is_interrupted()
// in its own loop. An interrupted exchange is no longer usable, like one after a time-out, and the
// other ranks' calls throw PeerError, naming this rank and the call.
#pragma once

#include <utility>

namespace weft {

class InterruptScope {
 public:
  using Check = bool (*)();

  explicit InterruptScope(Check check) : outer_(std::exchange(current, check)) {}
  ~InterruptScope() { current = outer_; }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  // Asks this thread's check, if there is one.
  [[nodiscard]] static bool is_interrupted() { return current != nullptr && current(); }

 private:
  static inline thread_local Check current = nullptr;
  Check outer_;
};

}  // namespace weft
