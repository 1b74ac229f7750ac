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
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/transport/peer_regions.hpp"
#include "survive/survival.hpp"

namespace weft {

class LossWatch {
 public:
  // Collective. `stop` ends the waits of this rank's kernels and all that is queued behind them, as
  // it may be called by another thread at any time. Throws Error (kUnsupported) where ranks share
  // no memory of the host. A rank that joins again waits until the members take it in, and is one
  // of them after meet(); throws TimeoutError if they do not.
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

    // What CallReport says of a rank with these, once all have agreed.
    [[nodiscard]] int64_t void_calls(const Calls& agreed) const {
      return static_cast<int64_t>(last + 1 - agreed.first_void);
    }
    [[nodiscard]] int64_t behind(const Calls& agreed) const {
      return static_cast<int64_t>(agreed.last - last);
    }
  };
  // Waits until those that are left are agreed on. `late`: a rank that has not begun the call
  // within the deadline, and is given up unless it is a thread of this process. -> the latest last
  // and the earliest first_void of all; nothing: no rank is lost. Throws PeerError if this rank is,
  // TimeoutError if others have not come.
  [[nodiscard]] std::optional<Calls> settle(
      std::string_view op, ErrorCode cause, const Calls& own, std::optional<int> late = std::nullopt
  );
  // Waits until all members are here, with their calls ended. Otherwise as settle(): ranks are
  // lost, and who is here has no more to say than those that are in a call.
  [[nodiscard]] std::optional<Calls> assemble(std::string_view op, const Calls& own);
  // A bit for each rank that is none of them.
  [[nodiscard]] uint32_t lost() const;
  [[nodiscard]] std::string invitation() const { return survival_.invitation(); }
  [[nodiscard]] bool has_ended(int rank) const;
  // Waits until new processes that take the places of these lost ranks are members, and then meets
  // all members. -> which of them did not ask for it in time. Throws what `connect` does; then this
  // rank has left.
  using Connect = std::function<void(const Group& members, const Meeting& who)>;
  [[nodiscard]] std::vector<int> readmit(std::span<const int> ranks, const Connect& connect);
  // Before and after that, as Survival has them.
  void check_lost(std::span<const int> ranks) const;
  void check_back(std::span<const int> ranks, std::span<const int> missing) const;
  // A rank that joins again meets the members. `connect` is called on all members, once more with
  // those that are left if ranks are lost meanwhile; what lost ones say in an all_gather of its
  // group is what this rank says.
  void meet(const Connect& connect);
  // The kernels may be stopped again.
  void resume();

 private:
  void run();
  void look();
  // Once others are members.
  [[nodiscard]] Calls agree_on_calls(std::string_view op, const Calls& own);
  void meet_at_last(const Connect& connect);

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
