// SPDX-License-Identifier: Apache-2.0
// How ranks on GPUs go on without those that are lost (PeerLoss::kShrink). A thread sees that one
// is lost and ends the waits of this rank's kernels, whatever its host does; the host's next call
// agrees with the hosts of all that are left on which calls are to be made again. Nothing is
// repaired inside a call, as what is queued behind it may have read it already.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <thread>

#include "survive/survival.hpp"

namespace weft {

class LossWatch {
 public:
  // Collective. `stop` ends the waits of this rank's kernels and all that is queued behind them, as
  // it may be called by another thread at any time. Throws Error (kUnsupported) where ranks share
  // no memory of the host.
  LossWatch(
      const Group& group,
      const Context& context,
      std::chrono::milliseconds timeout,
      std::function<void()> stop
  );
  ~LossWatch();  // this rank leaves

  // --- any thread ---
  // Ranks are lost, and the kernels have been stopped.
  [[nodiscard]] bool has_news() const { return has_news_.load(std::memory_order_acquire); }
  // The same within this time.
  [[nodiscard]] bool await_news(std::chrono::milliseconds at_most) const;
  // A rank has ended its exchange: a call that needs it will not end.
  [[nodiscard]] bool has_left() const { return has_left_.load(std::memory_order_relaxed); }
  [[nodiscard]] CallReport report() const;
  // Others shall not wait for this rank any more.
  void leave();
  // See Exchange::mask().
  void mask(std::span<const int> ranks);

  // --- the thread that calls, once this rank's kernels have ended ---
  // By their numbers on the GPUs.
  struct Calls {
    uint64_t last = 0;        // that has ended, well or not
    uint64_t first_void = 0;  // that has to be made again, the one after the last if none
  };
  // Waits until those that are left are agreed on. -> the latest last and the earliest first_void
  // of all; nothing: no rank is lost. Throws PeerError if this rank is, TimeoutError if others have
  // not come.
  [[nodiscard]] std::optional<Calls> settle(std::string_view op, ErrorCode cause, const Calls& own);
  // A bit for each rank that is none of them.
  [[nodiscard]] uint32_t lost() const;
  // The kernels may be stopped again.
  void resume();

 private:
  void run();
  void look();

  Context context_;
  std::chrono::milliseconds timeout_;
  std::function<void()> stop_;
  mutable std::mutex mutex_;  // guards what follows up to the next mark
  Survival survival_;
  Survival::Vigil vigil_;
  std::optional<std::chrono::steady_clock::time_point> seen_to_leave_;
  // ---
  std::atomic<bool> has_news_ = false;
  std::atomic<bool> has_left_ = false;
  std::atomic<bool> is_ended_ = false;
  std::thread thread_;
};

}  // namespace weft
