// SPDX-License-Identifier: Apache-2.0
// A testing aid: wraps a transport and drops, delays, reorders or fails what passes, on a seed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/check.hpp"
#include "transport/transport.hpp"

namespace weft {

// Probabilities of each put or raise, in [0, 1].
struct FaultPlan {
  uint64_t seed = 1;   // with the rank, decides every fate in the order of calls
  double drop = 0;     // never arrives, its signal never grows
  double delay = 0;    // held back, also behind later ones
  double fail = 0;     // the call throws, nothing of it is sent
  double reorder = 0;  // of a call: its puts go out in random order
  std::chrono::microseconds hold = std::chrono::microseconds(500);  // longest delay
  bool hide_mapped = false;  // mapped() is null, so that all goes by put()
};

struct FaultyName {
  std::string inner;  // the transport that is wrapped
  FaultPlan plan;
};

// "faulty:shm?seed=7&delay=0.2&hide_mapped=1": keys are the members above, hold_us for `hold`.
// Empty for a name without that prefix. Throws Error (kInvalidArgument) naming the fault.
[[nodiscard]] std::optional<FaultyName> parse_faulty_name(std::string_view name);

// What it delays still arrives: a thread of its own sends it after FaultPlan::hold, or the rank
// does so earlier when it makes progress or parks.
class FaultyTransport final : public Transport {
 public:
  // What happened to puts and raises; `passed` went straight through.
  struct Counts {
    uint64_t passed = 0;
    uint64_t dropped = 0;
    uint64_t delayed = 0;
    uint64_t failed_calls = 0;
    uint64_t reordered_calls = 0;
  };

  FaultyTransport(std::unique_ptr<Transport> inner, const FaultPlan& plan, const Group& group);
  ~FaultyTransport() override;
  FaultyTransport(const FaultyTransport&) = delete;
  FaultyTransport& operator=(const FaultyTransport&) = delete;
  [[nodiscard]] Counts counts() const;

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Region allocate(uint64_t bytes) override { return inner_->allocate(bytes); }
  [[nodiscard]] Region lend(std::byte* data, uint64_t bytes, const Device& device) override;
  [[nodiscard]] std::string lend_obstacle(const Device& device) const override;
  void release(const RegionRef& region) override { inner_->release(region); }
  void import(int rank, const RegionRef& region) override { inner_->import(rank, region); }
  void put(int rank, std::span<const Put> puts) override;
  void raise(int rank, uint32_t signal, uint64_t amount) override;
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override;
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override {
    return inner_->signal_value(signal);
  }
  void progress() override;
  [[nodiscard]] uint32_t doorbell() const override { return inner_->doorbell(); }
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override;
  [[nodiscard]] PeerState peer_state(int rank) const override { return inner_->peer_state(rank); }
  void close() override;

 private:
  using Clock = std::chrono::system_clock;  // ThreadSanitizer does not know waits by steady_clock
  struct Held {
    Clock::time_point due;
    int rank = 0;
    bool is_raise = false;
    uint64_t amount = 0;           // of a raise
    Put put = {};                  // its source is `bytes`; a raise uses only the signal
    std::vector<std::byte> bytes;  // the caller may reuse its source
  };
  enum class Fate : uint8_t { kPass, kDrop, kDelay };

  [[nodiscard]] Context context() const;
  // With mutex_ held:
  [[nodiscard]] bool roll(double probability);
  [[nodiscard]] Fate next_fate();
  void start_call(int rank);  // throws what is due to be thrown
  void hold(Held held);
  [[nodiscard]] std::vector<Held> take_due(Clock::time_point now);

  void send(std::vector<Held> held);
  void send_due(Clock::time_point now);
  void send_due_forever(const std::stop_token& stop);

  std::unique_ptr<Transport> inner_;
  FaultPlan plan_;
  int rank_;
  int num_ranks_;
  std::string name_;

  mutable std::mutex mutex_;  // guards what follows
  std::mt19937_64 random_;
  std::vector<Held> held_;
  Counts counts_;
  std::exception_ptr failure_;  // of a late send; thrown by the next call
  bool is_closed_ = false;
  std::condition_variable_any held_changed_;
  std::jthread sender_;  // last: stops before the rest goes
};

}  // namespace weft
