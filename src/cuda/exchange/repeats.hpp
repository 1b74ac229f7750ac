// SPDX-License-Identifier: Apache-2.0
// Keeps the launches of calls that can be made again while their caller waits for its stream
// (PeerLoss::kRepeat), and the lock between the calling thread and the one that watches for losses
// (loss_watch.hpp). losses.cpp makes the calls again.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/layout/launch.hpp"
#include "cuda/memory/owners.hpp"
#include "plan/plan_data.hpp"

namespace weft {

class CallRepeats {
 public:
  using Launch = std::function<void(cudaStream_t)>;
  // Most gates that the caller may be ahead; about a thousand launches fill a queue. A guess.
  static constexpr uint64_t kMostAhead = 8;

  CallRepeats(int gpu, const Context& context);

  // Held by a call from its beginning until it is queued. The same thread may take it again.
  class Lock {
   public:
    explicit Lock(CallRepeats* of) : of_(of) {
      if (of_ != nullptr) {
        of_->lock();
      }
    }
    ~Lock() {
      if (of_ != nullptr) {
        of_->unlock();
      }
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    CallRepeats* of_;
  };
  [[nodiscard]] bool try_lock();
  void lock();
  void unlock();
  // Runs `wait` with this thread's locks given up: calls may have to be made again meanwhile.
  template <class Wait>
  void unlocked(const Wait& wait) {
    const int depth = depth_;
    for (int i = 0; i < depth; ++i) {
      unlock();
    }
    wait();
    for (int i = 0; i < depth; ++i) {
      lock();
    }
  }

  // --- with the lock ---
  // Keeps a launch before the next gate, and its plan, if any. An empty `launch` stands for one
  // that cannot be made again.
  void keep(Launch launch, const PlanView& plan = {});
  // Forgets the launches since the last gate: they are captured, or void.
  void drop() { open_ = {}; }
  // Notes a gate behind the `num_calls` queued since the last gate. Returns its number.
  uint64_t close(int num_calls);
  // The calls before a gate; find() returns null if there is no such gate.
  struct Group {
    uint64_t number = 0;
    int num_calls = 0;
    bool is_possible = true;
    std::vector<Launch> launches;
    std::vector<PlanView> plans;  // that they follow: their holders may have let go of them
  };
  [[nodiscard]] const Group* find(uint64_t number) const;
  // Keeps a plan by which calls may come after a loss.
  void keep_plan(const std::shared_ptr<const DevicePlan>& plan, const PlanView& view);
  // Takes lost ranks out of plans that are alive or that queued calls follow, in stream().
  void forget_lost(const RankView& me) const;

  // Returns whether the thread that calls is so many gates ahead of its GPU that it has to wait.
  // The driver takes no work of any thread while it has no room for what one has launched, so that
  // no thread could make calls again.
  [[nodiscard]] bool is_far_ahead() const {
    return num_gates_ - *static_cast<volatile uint64_t*>(done_.get()) >= kMostAhead;
  }
  // Returns whether a gate holds that no thread is about to open; any thread may ask.
  [[nodiscard]] bool is_held() const {
    const uint64_t held = *static_cast<volatile uint64_t*>(done_.get() + 1);
    return held != 0 && held != opened_.load(std::memory_order_relaxed);
  }
  // Notes that gate `number` opens once its calls have been made again.
  void open(uint64_t number) { opened_.store(number, std::memory_order_relaxed); }
  [[nodiscard]] uint64_t* done() const { return done_.get(); }
  // Returns the stream of repetitions and of the host's work while a gate holds another stream.
  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }

  std::atomic<bool> is_unheard = false;  // calls were made again since the caller was last told

 private:
  std::recursive_mutex mutex_;
  int depth_ = 0;  // how often the thread that has locked it has
  // Stream of Urgency::kRepetition: otherwise the work behind a gate that holds would keep back
  // what opens the gate.
  std::unique_ptr<CUstream_st, CudaDeleter<cudaStreamDestroy>> stream_;
  PinnedBuffer<uint64_t> done_;  // GateLaunch's
  std::atomic<uint64_t> opened_ = 0;
  Group open_;
  std::deque<Group> closed_;  // whose gates have not ended when last looked
  uint64_t num_gates_ = 0;
  struct KnownPlan {
    std::weak_ptr<const DevicePlan> alive;
    PlanView view;
  };
  std::vector<KnownPlan> plans_;
  size_t sweep_at_ = 64;  // so many plans
};

}  // namespace weft
