// SPDX-License-Identifier: Apache-2.0
// A testing aid: wraps a transport and drops, delays, reorders or fails what passes, on a seed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
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

// Reads "faulty:shm?seed=7&delay=0.2&hide_mapped=1": keys are members of FaultPlan, hold_us for
// `hold`. Empty for a name without that prefix. Throws Error (kInvalidArgument) naming the fault.
[[nodiscard]] std::optional<FaultyName> parse_faulty_name(std::string_view name);

// Delayed puts and raises still arrive: a thread of its own sends them after FaultPlan::hold, or
// the rank does so earlier when it makes progress or parks.
class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultPlan& plan, const Group& group);
  ~FaultyTransport() override { close(); }
  FaultyTransport(const FaultyTransport&) = delete;
  FaultyTransport& operator=(const FaultyTransport&) = delete;

  [[nodiscard]] std::string_view name() const override { return name_; }
  [[nodiscard]] Region allocate(uint64_t bytes) override { return inner_->allocate(bytes); }
  [[nodiscard]] Region lend(std::byte* data, uint64_t bytes, const Device& device) override;
  [[nodiscard]] std::string lend_obstacle(const Device& device) const override;
  void release(const RegionRef& region) override { inner_->release(region); }
  void import(int rank, const RegionRef& region) override { inner_->import(rank, region); }
  void put(int rank, std::span<const Put> puts) override;
  void raise(int rank, uint32_t signal, uint64_t amount) override;
  [[nodiscard]] std::byte* mapped(int rank, uint32_t region) const override {
    return plan_.hide_mapped ? nullptr : inner_->mapped(rank, region);
  }
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override {
    return inner_->signal_value(signal);
  }
  void progress() override {
    send_due(Clock::now());
    inner_->progress();
  }
  [[nodiscard]] uint32_t doorbell() const override { return inner_->doorbell(); }
  // Sends what is held back first, as this rank may sleep until a peer answers that.
  void park(uint32_t seen, std::chrono::nanoseconds at_most) override {
    send_due(Clock::time_point::max());
    inner_->park(seen, at_most);
  }
  [[nodiscard]] PeerState peer_state(int rank) const override { return inner_->peer_state(rank); }
  void close() override;

 private:
  using Clock = std::chrono::system_clock;  // ThreadSanitizer does not know waits by steady_clock
  using Send = std::function<void(Transport& inner)>;
  struct Held {
    Clock::time_point due;
    Send send;
  };

  // With mutex_ held:
  [[nodiscard]] bool roll(double probability) {
    return std::uniform_real_distribution<double>()(random_) < probability;
  }
  void start_call(int rank);  // throws an earlier failure, or one drawn now
  // Decides what becomes of a put or raise: true if it passes now. `make_send` is called for what
  // is held back.
  [[nodiscard]] bool passes(const std::function<Send()>& make_send);
  [[nodiscard]] std::vector<Held> take_due(Clock::time_point now);

  void send(const std::vector<Held>& held);
  void send_due(Clock::time_point now);
  void send_due_forever(const std::stop_token& stop);

  std::unique_ptr<Transport> inner_;
  FaultPlan plan_;
  std::string name_;
  Context context_;
  bool is_closed_ = false;

  std::mutex mutex_;  // guards what follows
  std::mt19937_64 random_;
  std::vector<Held> held_;
  std::exception_ptr failure_;  // of a late send; thrown by the next call
  std::condition_variable_any held_changed_;
  std::jthread sender_;  // last: stops before the rest goes
};

}  // namespace weft
