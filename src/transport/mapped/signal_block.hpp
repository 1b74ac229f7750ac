// SPDX-License-Identifier: Apache-2.0
// One rank's signals and state, in memory that its peers reach. Every field but pid is touched by
// atomic operations alone; all zero is the first state.
//
// Order. Three pairs carry everything:
//   1. raise(): signal += n (release)         with  signal(): load (acquire).
//      What the raiser stored before is visible to whoever sees the new count.
//   2. ring(): doorbell += 1                  with  doorbell(): load (acquire).
//      Whoever sees the new doorbell sees the signals raised before it, so "read doorbell, test
//      signals, park on that doorbell" misses nothing.
//   3. ring(): doorbell += 1, then waiters?   with  park(): waiters += 1, then doorbell?
//      A store followed by a load of the other side's word: all four are seq_cst, so at least one
//      side sees the other. Either the parker sees the new doorbell and stays awake, or the ringer
//      sees the parker and wakes it; between the parker's look and its sleep the kernel compares
//      the doorbell once more.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace weft {

constexpr uint32_t kMaxRegions = 4096;  // alive at once, per rank

// A view; does not own the memory.
class SignalBlock {
 public:
  SignalBlock() = default;
  explicit SignalBlock(std::byte* data) : data_(data) {}
  [[nodiscard]] static uint64_t num_bytes(uint32_t num_signals);

  // --- owner ---
  void set_pid(int32_t pid);  // before peers learn of the block
  void set_left();
  // Generation of the region alive in `slot`, 0 for none.
  void set_generation(uint32_t slot, uint32_t generation);
  // Sleeps until the doorbell differs from `seen`, time is up, or for no reason.
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most);

  // --- anyone ---
  void raise(uint32_t signal, uint64_t amount);
  void ring();  // after raises, once for many; wakes sleepers
  [[nodiscard]] uint64_t signal(uint32_t signal) const;
  [[nodiscard]] uint32_t doorbell() const;
  [[nodiscard]] int32_t pid() const;
  [[nodiscard]] bool has_left() const;
  [[nodiscard]] uint32_t generation(uint32_t slot) const;
  [[nodiscard]] uint32_t num_releases() const;  // moves when a generation becomes 0

 private:
  struct Header;
  [[nodiscard]] Header& header() const;
  [[nodiscard]] uint64_t& signal_word(uint32_t signal) const;
  std::byte* data_ = nullptr;
};

}  // namespace weft
