// SPDX-License-Identifier: Apache-2.0
// One rank's signals and state, in memory that its peers reach. Every field but pid is touched only
// by atomic operations; all zero is the first state.
//
// Order. Three pairs carry everything:
//   1. raise(): signal += n (release)         with  signal(): load (acquire).
//      What the raiser stored before is visible to a thread that sees the new count.
//   2. ring(): doorbell += 1                  with  doorbell(): load (acquire).
//      A thread that sees the new doorbell sees the signals raised before, so "read doorbell, test
//      signals, park on that doorbell" misses nothing.
//   3. ring(): doorbell += 1, then waiters?   with  sleep(): waiters += 1, then doorbell?
//      A store followed by a load of the other side's word: all four are seq_cst, so at least one
//      side sees the other. Either the sleeper sees the new doorbell and stays awake, or the ringer
//      sees the sleeper and wakes it; between the sleeper's look and its sleep the kernel compares
//      the doorbell once more.
#pragma once

#include <climits>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {

constexpr uint32_t kMaxRegions = 4096;  // alive at once, per rank

// A view; does not own the memory.
class SignalBlock {
 public:
  SignalBlock() = default;
  explicit SignalBlock(std::byte* data) : data_(data) {}
  [[nodiscard]] static uint64_t num_bytes(uint32_t num_signals) {
    return sizeof(Header) + uint64_t{num_signals} * sizeof(uint64_t);
  }

  // --- owner ---
  void set_pid() { header().pid = ::getpid(); }  // before peers learn of the block
  // False in a child that fork() made of the owner: it must not end what it inherits.
  [[nodiscard]] bool is_here() const { return header().pid == ::getpid(); }
  // Tells peers that the owner has left; `dead`: a rank whose death it has seen; -1: none.
  void set_left(int dead) {
    Atomic32(header().left).store(static_cast<uint32_t>(dead + 2), std::memory_order_release);
  }
  // Publishes the generation of the region alive in `slot`, 0 for none.
  void set_generation(uint32_t slot, uint32_t generation) {
    Atomic32(header().generation[slot]).store(generation, std::memory_order_release);
    if (generation == 0) {
      Atomic32(header().num_releases).fetch_add(1, std::memory_order_release);
    }
  }
  // Sleeps until the doorbell differs from `seen`, time is up, or for no reason.
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most);

  // --- anyone ---
  void raise(uint32_t signal, uint64_t amount) {
    Atomic64(signal_word(signal)).fetch_add(amount, std::memory_order_release);
  }
  void ring();  // after raises, once for many; wakes sleepers
  [[nodiscard]] uint64_t signal(uint32_t signal) const {
    return Atomic64(signal_word(signal)).load(std::memory_order_acquire);
  }
  [[nodiscard]] uint32_t doorbell() const {
    return Atomic32(header().doorbell).load(std::memory_order_acquire);
  }
  [[nodiscard]] int32_t pid() const { return header().pid; }
  [[nodiscard]] bool has_left() const {
    return Atomic32(header().left).load(std::memory_order_acquire) != 0;
  }
  // Returns the rank whose death the owner had seen when it left; -1: none, or it has not left.
  [[nodiscard]] int told_death() const {
    const uint32_t left = Atomic32(header().left).load(std::memory_order_relaxed);
    return std::max(static_cast<int>(left) - 2, -1);
  }
  [[nodiscard]] uint32_t generation(uint32_t slot) const {
    return Atomic32(header().generation[slot]).load(std::memory_order_acquire);
  }
  // Returns how often a generation became 0; wraps.
  [[nodiscard]] uint32_t num_releases() const {
    return Atomic32(header().num_releases).load(std::memory_order_acquire);
  }

 private:
  using Atomic32 = std::atomic_ref<uint32_t>;
  using Atomic64 = std::atomic_ref<uint64_t>;
  // Words are shared between processes, which a hidden lock would not survive.
  static_assert(Atomic32::is_always_lock_free && Atomic64::is_always_lock_free);

  // Words that are written often, and by different sides, have cache lines of their own.
  struct Header {
    alignas(64) uint32_t doorbell;
    alignas(64) uint32_t waiters;
    alignas(64) uint32_t left;  // 0: not yet, 1: yes, 2 + n: after rank n died
    int32_t pid;
    uint32_t num_releases;
    alignas(64) uint32_t generation[kMaxRegions];
  };
  [[nodiscard]] Header& header() const { return *reinterpret_cast<Header*>(data_); }
  [[nodiscard]] uint64_t& signal_word(uint32_t signal) const {
    return reinterpret_cast<uint64_t*>(data_ + sizeof(Header))[signal];
  }
  std::byte* data_ = nullptr;
};

inline void SignalBlock::sleep(uint32_t seen, std::chrono::nanoseconds at_most) {
  constexpr int64_t kNanosPerSecond = 1'000'000'000;
  const int64_t nanos = std::max<int64_t>(at_most.count(), 0);
  const timespec timeout = {
      .tv_sec = static_cast<time_t>(nanos / kNanosPerSecond),
      .tv_nsec = static_cast<long>(nanos % kNanosPerSecond)};
  const Atomic32 waiters(header().waiters);
  const Atomic32 doorbell(header().doorbell);
  waiters.fetch_add(1, std::memory_order_seq_cst);
  if (doorbell.load(std::memory_order_seq_cst) == seen) {
    ::syscall(SYS_futex, &header().doorbell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  waiters.fetch_sub(1, std::memory_order_relaxed);
}

inline void SignalBlock::ring() {
  Atomic32(header().doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (Atomic32(header().waiters).load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &header().doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace weft
