// SPDX-License-Identifier: Apache-2.0
#include "transport/mapped/signal_block.hpp"

#include <climits>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace weft {
namespace {

using Atomic32 = std::atomic_ref<uint32_t>;
using Atomic64 = std::atomic_ref<uint64_t>;
constexpr int64_t kNanosPerSecond = 1'000'000'000;

// Words are shared between processes, which a hidden lock would not survive.
static_assert(Atomic32::is_always_lock_free && Atomic64::is_always_lock_free);

}  // namespace

// What is written often, and by different sides, has a cache line of its own.
struct SignalBlock::Header {
  alignas(64) uint32_t doorbell;
  alignas(64) uint32_t waiters;
  alignas(64) uint32_t has_left;
  int32_t pid;
  uint32_t num_releases;
  alignas(64) uint32_t generation[kMaxRegions];
};

uint64_t SignalBlock::num_bytes(uint32_t num_signals) {
  return sizeof(Header) + uint64_t{num_signals} * sizeof(uint64_t);
}

SignalBlock::Header& SignalBlock::header() const {
  return *reinterpret_cast<Header*>(data_);
}

uint64_t& SignalBlock::signal_word(uint32_t signal) const {
  return reinterpret_cast<uint64_t*>(data_ + sizeof(Header))[signal];
}

void SignalBlock::set_pid(int32_t pid) {
  header().pid = pid;
}

void SignalBlock::set_left() {
  Atomic32(header().has_left).store(1, std::memory_order_release);
}

void SignalBlock::set_generation(uint32_t slot, uint32_t generation) {
  Atomic32(header().generation[slot]).store(generation, std::memory_order_release);
  if (generation == 0) {
    Atomic32(header().num_releases).fetch_add(1, std::memory_order_release);
  }
}

void SignalBlock::sleep(uint32_t seen, std::chrono::nanoseconds at_most) {
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

void SignalBlock::raise(uint32_t signal, uint64_t amount) {
  Atomic64(signal_word(signal)).fetch_add(amount, std::memory_order_release);
}

void SignalBlock::ring() {
  Atomic32(header().doorbell).fetch_add(1, std::memory_order_seq_cst);
  if (Atomic32(header().waiters).load(std::memory_order_seq_cst) != 0) {
    ::syscall(SYS_futex, &header().doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

uint64_t SignalBlock::signal(uint32_t signal) const {
  return Atomic64(signal_word(signal)).load(std::memory_order_acquire);
}

uint32_t SignalBlock::doorbell() const {
  return Atomic32(header().doorbell).load(std::memory_order_acquire);
}

int32_t SignalBlock::pid() const {
  return header().pid;
}

bool SignalBlock::has_left() const {
  return Atomic32(header().has_left).load(std::memory_order_acquire) != 0;
}

uint32_t SignalBlock::generation(uint32_t slot) const {
  return Atomic32(header().generation[slot]).load(std::memory_order_acquire);
}

uint32_t SignalBlock::num_releases() const {
  return Atomic32(header().num_releases).load(std::memory_order_acquire);
}

}  // namespace weft
