// SPDX-License-Identifier: Apache-2.0
// The byte geometry of every region that peers write, for host and device alike. No order of fields
// is spelled anywhere else.
//
// Control region of a rank: what its peers tell it. `source` is always the rank that writes.
//
//   handshakes   [2 parities][num_ranks]   CallWord, then the payload of a plan call (counts)
//   records      [num_ranks]               u64 length, then encode_records() of this pair, or, at
//                                          the forwarder of a source, a bundle for its domain
//
// A parity's word may be overwritten two calls later: by then every rank has read it
// (call_board.hpp).
#pragma once

#include <concepts>
#include <cstdint>

#include "call/chunks.hpp"
#include "core/hd.hpp"

namespace weft {

WEFT_HD constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// The number of a rank, a call, a chunk or a pair, whatever type of integer the caller counts in.
class Index {
 public:
  template <std::integral T>
  WEFT_HD constexpr Index(T value) : value_(static_cast<uint64_t>(value)) {}
  WEFT_HD constexpr operator uint64_t() const { return value_; }

 private:
  uint64_t value_;
};

struct ControlMap {
  uint64_t num_ranks = 1;
  uint64_t word_bytes = 0;     // of a CallWord
  uint64_t payload_bytes = 0;  // most that follows a CallWord
  uint64_t record_bytes = 0;   // most that encode_records() or bundle_records() returns

  [[nodiscard]] WEFT_HD constexpr uint64_t call_stride() const {
    return align_up(word_bytes + payload_bytes, 64);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t call_offset(Index call, Index source) const {
    return (call % 2 * num_ranks + source) * call_stride();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t record_stride() const {
    return align_up(sizeof(uint64_t) + record_bytes, 64);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t record_offset(Index source) const {
    return 2 * num_ranks * call_stride() + source * record_stride();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const { return record_offset(num_ranks); }
};

// Signals of a rank, by the peer that raises them.
struct SignalMap {
  uint32_t num_ranks = 1;
  uint32_t max_chunks = 0;           // num_chunks(max_tokens)
  bool has_crossings = false;        // the group has several domains
  uint32_t num_forwarded_pairs = 0;  // most pairs (source, member) that a rank forwards

  // One for each parity: words of neighbouring calls may overtake each other, and a count that both
  // raise would not tell which one has come.
  [[nodiscard]] WEFT_HD constexpr uint32_t call(Index call, Index source) const {
    return static_cast<uint32_t>(call % 2 * num_ranks + source);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t records(Index source) const {
    return static_cast<uint32_t>(2 * num_ranks + source);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t source_weights(Index source) const {
    return static_cast<uint32_t>(3 * num_ranks + source);
  }
  // Raised once `reader` needs this rank's rows no more.
  [[nodiscard]] WEFT_HD constexpr uint32_t rows_read(Index reader) const {
    return static_cast<uint32_t>(4 * num_ranks + reader);
  }
  // `source` was interrupted: holds the number of the call in which that happened.
  [[nodiscard]] WEFT_HD constexpr uint32_t interrupted(Index source) const {
    return static_cast<uint32_t>(5 * num_ranks + source);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t dispatch(Index source, Index chunk) const {
    return static_cast<uint32_t>(6 * num_ranks + source * max_chunks + chunk);
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t combine(Index source, Index chunk) const {
    return static_cast<uint32_t>(6 * num_ranks + (num_ranks + source) * max_chunks + chunk);
  }
  // A chunk of inter-node tokens: at the forwarder, of rows from their source; at the source, of
  // sums from their forwarder.
  [[nodiscard]] WEFT_HD constexpr uint32_t crossing(Index peer, Index chunk) const {
    return static_cast<uint32_t>(combine(num_ranks, 0) + peer * max_chunks + chunk);
  }
  // At a forwarder: partial sums of a pair that it forwards, numbered by
  // Domains::pair_at_forwarder().
  [[nodiscard]] WEFT_HD constexpr uint32_t forwarded(Index pair, Index chunk) const {
    return static_cast<uint32_t>(
        crossing(has_crossings ? num_ranks : 0, 0) + pair * max_chunks + chunk
    );
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const {
    return forwarded(num_forwarded_pairs, 0);
  }
  // Number of signals in 64 bits: where 32 do not suffice, there are no such signals.
  [[nodiscard]] WEFT_HD constexpr uint64_t needed() const {
    const uint64_t lists = uint64_t{num_ranks} * (has_crossings ? 3 : 2) + num_forwarded_pairs;
    return 6 * uint64_t{num_ranks} + lists * max_chunks;
  }
};

}  // namespace weft
