// SPDX-License-Identifier: Apache-2.0
// Words of shared_roll.hpp that are changed by compare-and-swap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/check.hpp"
#include "group/control_plane.hpp"

namespace weft {

// The word that decides. Calls count modulo 2^23, which no two of them are apart.
struct RollState {
  static constexpr int kCallBits = 23;
  static constexpr int kSeatBits = 15;
  static constexpr uint64_t kMaxEpoch = (uint64_t{1} << (64 - kCallBits - kSeatBits)) - 1;
  static_assert(2 * kMaxRanks <= 1 << kSeatBits);

  uint64_t epoch = 0;
  uint64_t proposer = 0;  // the seat of its line
  uint64_t committed = 0;

  explicit RollState(uint64_t bits)
      : epoch(bits >> (kCallBits + kSeatBits)),
        proposer(bits >> kCallBits & ((uint64_t{1} << kSeatBits) - 1)),
        committed(counted(bits)) {}
  [[nodiscard]] uint64_t bits() const {
    return (epoch << kSeatBits | proposer) << kCallBits | committed;
  }
  [[nodiscard]] static uint64_t counted(uint64_t call) {
    return call & ((uint64_t{1} << kCallBits) - 1);
  }
  [[nodiscard]] static uint64_t arrival(uint64_t epoch, uint64_t call) {
    return epoch << kCallBits | counted(call);
  }

  // Takes the members that `seat` proposes. Throws Error (kUnsupported) after kMaxEpoch changes.
  void change(size_t seat, const Context& context) {
    WEFT_CHECK(
        context,
        epoch < kMaxEpoch,
        ErrorCode::kUnsupported,
        "survive: the members have changed {} times (at most {}); make the exchange again",
        epoch,
        kMaxEpoch
    );
    ++epoch;
    proposer = seat;
  }
};

// Holder of a line: a process, in a life of its place.
struct RollHolder {
  static constexpr int kPidBits = 24;  // a kernel has no more than 22
  static constexpr int kTurnBits = 8;

  uint64_t life = 0;
  uint64_t turn = 0;  // how often the line was taken, modulo 2^8: tells apart those of one process
  uint64_t pid = 0;

  RollHolder() = default;
  explicit RollHolder(uint64_t bits)
      : life(bits >> (kTurnBits + kPidBits)),
        turn(bits >> kPidBits & ((uint64_t{1} << kTurnBits) - 1)),
        pid(bits & ((uint64_t{1} << kPidBits) - 1)) {}
  // Never 0.
  [[nodiscard]] uint64_t bits() const { return (life << kTurnBits | turn) << kPidBits | pid; }
  // Returns the holder that takes the line from this one.
  [[nodiscard]] RollHolder next(uint64_t of_life, uint64_t by_pid) const {
    RollHolder next;
    next.life = of_life;
    next.turn = (turn + 1) % (uint64_t{1} << kTurnBits);
    next.pid = by_pid;
    return next;
  }
};

}  // namespace weft
