// SPDX-License-Identifier: Apache-2.0
// A transport without peers: a test says what its signals and peers look like.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "transport/transport.hpp"

namespace weft::test {

class FakeTransport final : public Transport {
 public:
  std::vector<uint64_t> signals = std::vector<uint64_t>(16);
  std::vector<PeerState> peers = std::vector<PeerState>(8, PeerState::kAlive);
  std::function<void()> on_park;  // whatever happens while the rank sleeps
  std::chrono::nanoseconds longest_park = std::chrono::hours(1);  // until something wakes it
  int num_allocations = 0;
  std::map<uint32_t, std::vector<std::byte>> regions;  // live ones, by slot

  [[nodiscard]] std::string_view name() const override { return "fake"; }
  [[nodiscard]] Region allocate(uint64_t bytes) override {
    const auto slot = static_cast<uint32_t>(num_allocations++);
    regions[slot].resize(bytes);
    return {regions[slot].data(), {.slot = slot, .generation = 1, .bytes = bytes}};
  }
  void release(const RegionRef& region) override { regions.erase(region.slot); }
  void import(int /*rank*/, const RegionRef& /*region*/) override {}
  void put(int /*rank*/, std::span<const Put> /*puts*/) override {}
  void raise(int /*rank*/, uint32_t /*signal*/, uint64_t /*amount*/) override {}
  [[nodiscard]] std::byte* mapped(int /*rank*/, uint32_t /*region*/) const override {
    return nullptr;
  }
  [[nodiscard]] uint64_t signal_value(uint32_t signal) const override { return signals[signal]; }
  void progress() override {}
  [[nodiscard]] uint32_t doorbell() const override { return 0; }
  void park(uint32_t /*seen*/, std::chrono::nanoseconds at_most) override {
    std::this_thread::sleep_for(std::min(at_most, longest_park));
    if (on_park) {
      on_park();
    }
  }
  [[nodiscard]] PeerState peer_state(int rank) const override {
    return peers[static_cast<size_t>(rank)];
  }
  void close() override {}
};

}  // namespace weft::test
