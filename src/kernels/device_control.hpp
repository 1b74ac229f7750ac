// SPDX-License-Identifier: Apache-2.0
// What the GPUs of a domain say to each other, and where: the byte geometry of a rank's control
// region in device memory, for host and device alike. Peers write it, its owner reads it; it starts
// all zero and nothing in it is ever reset.
//
// Every call has a number, its epoch, counted on each GPU by the kernels themselves, so that a
// replayed graph goes on counting. A signal is raised by storing the epoch of the call: it says
// "done up to this call", and a signal that a failed call never raised does not confuse the next.
//
//   signals     see SignalSlots
//   words       [2 parities][num_ranks]  DeviceWord, then arrivals [num_ranks] and routes
//               [num_experts] int32 of a plan call
//   weights     [num_ranks][max_tokens][max_topk] fp32 by (source, arrival, k): of dispatch, or of
//               kSourceWeights
//   returned    [max_tokens][max_topk] fp32 by (token, k): weight gradients of combine
//   stamp       uint64 of the exchange, written by the owner when the exchange is made
//   early       [2 parities] of calls whose rows go before words have come: rows, scale rows and
//               weights [max_topk] of [num_ranks * max_tokens] tokens. Of a dispatch that makes its
//               plan by (source, token); of combine as in staging and in `returned`
//
// A parity's word may be overwritten two calls later: by then every rank has read it, because no
// kernel ends before it has seen the words of all ranks. The same holds for early rows, which are
// written before any word of their call has come.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.hpp"
#include "core/peer_address.hpp"

namespace weft {

enum class DeviceOp : uint32_t { kNone, kPlan, kDispatch, kCombine };

enum class WordStatus : uint32_t {
  kGood,
  kRefused,  // this rank does not run the call; every rank gives it up
};

// Where a source writes an arrival's row.
enum class DevicePlace : uint32_t {
  kStaging,      // row (arrival_base + arrival) of the receiver's staging; it copies to every slot
  kPrimarySlot,  // the first slot of the receiver's output; it copies to the others
  kEarly,        // before slots are known: the token's place among the receiver's early rows
};

inline constexpr int kDeviceSignatureFields = 10;

struct alignas(16) DeviceWord {
  DeviceOp op = DeviceOp::kNone;
  WordStatus status = WordStatus::kGood;
  int32_t num_tokens = 0;
  DevicePlace place = DevicePlace::kStaging;
  PeerAddress rows;  // plan: the sender's plan block; dispatch: its output or staging; combine: its
                     // staging
  PeerAddress scales;  // dispatch: staging
  int64_t row_budget = -1;
  int64_t signature[kDeviceSignatureFields] = {};  // must be equal on all ranks
  uint64_t stamp = 0;                              // of the sender's exchange
};

// Tokens that one signal covers. Few tokens: a signal each, since latency decides; many: fewer
// signals, which cost a fence each.
inline constexpr int kLongChunkTokens = 4;

WEFT_HD constexpr int chunk_tokens(int64_t num_tokens) {
  return num_tokens <= 512 ? 1 : kLongChunkTokens;
}

// By constants: a GPU divides by a variable slowly.
WEFT_HD constexpr int num_device_chunks(int64_t num_tokens) {
  const bool is_long = chunk_tokens(num_tokens) > 1;
  return static_cast<int>(
      is_long ? (num_tokens + kLongChunkTokens - 1) / kLongChunkTokens : num_tokens
  );
}

// Indices of the uint32 signals of a rank; `source` is the rank that raises.
struct SignalSlots {
  uint32_t num_ranks = 1;
  uint32_t max_chunks = 1;

  [[nodiscard]] WEFT_HD constexpr uint32_t word(uint32_t epoch, uint32_t source) const {
    return epoch % 2 * num_ranks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t records(uint32_t source) const {
    return 2 * num_ranks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t source_weights(uint32_t source) const {
    return 3 * num_ranks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t dispatch(uint32_t source, uint32_t chunk) const {
    return 4 * num_ranks + source * max_chunks + chunk;
  }
  // `chunk` of the reader's own tokens.
  [[nodiscard]] WEFT_HD constexpr uint32_t combine(uint32_t source, uint32_t chunk) const {
    return 4 * num_ranks + (num_ranks + source) * max_chunks + chunk;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const {
    return 4 * num_ranks + 2 * num_ranks * max_chunks;
  }
};

// Most tokens of a rank in a call whose rows may go before their slots are known, and most memory
// for such rows: beyond, the wire takes longer than a plan.
inline constexpr uint32_t kMaxEarlyTokens = 512;
inline constexpr uint64_t kMaxEarlyBytes = 256 << 20;
inline constexpr uint32_t kEarlyScaleBytes = 256;

// Of a row of 16-bit elements; 0 where there is to be no room for early rows.
WEFT_HD constexpr uint32_t early_row_room(
    uint64_t num_ranks, uint64_t max_tokens, uint64_t hidden
) {
  const uint64_t row = (2 * hidden + 15) / 16 * 16;
  const bool fits = max_tokens <= kMaxEarlyTokens &&
                    2 * num_ranks * max_tokens * (row + kEarlyScaleBytes) <= kMaxEarlyBytes;
  return fits ? static_cast<uint32_t>(row) : 0;
}

struct DeviceControlMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t max_tokens = 1;
  uint32_t max_topk = 1;
  uint32_t early_row_bytes = 0;

  [[nodiscard]] WEFT_HD static constexpr uint64_t align(uint64_t value) {
    return (value + 127) / 128 * 128;
  }
  [[nodiscard]] WEFT_HD constexpr SignalSlots signals() const {
    const uint32_t chunks = max_tokens <= 512 ? max_tokens : (max_tokens + 3) / 4;
    return {num_ranks, chunks < 512 ? 512 : chunks};  // 512: shorter calls have a chunk per token
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t word_stride() const {
    return align(sizeof(DeviceWord) + sizeof(int32_t) * (num_ranks + num_experts));
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t word_offset(uint32_t epoch, uint32_t source) const {
    return align(sizeof(uint32_t) * signals().size()) +
           (epoch % 2 * num_ranks + source) * word_stride();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t weights_offset(uint32_t source) const {
    return word_offset(0, 0) + 2 * num_ranks * word_stride() +
           source * align(sizeof(float) * max_tokens * max_topk);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t returned_offset(uint32_t epoch, bool is_early) const {
    return is_early ? early_weights_offset(epoch, 0) : weights_offset(num_ranks);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t stamp_offset() const {
    return weights_offset(num_ranks + 1);
  }
  // Early rows, scale rows and weights of all sources in a call's parity, [num_ranks * max_tokens]
  // each; rows and scale rows are as long as the call's.
  [[nodiscard]] WEFT_HD constexpr uint64_t early_rows_offset(uint32_t epoch) const {
    return stamp_offset() + align(sizeof(uint64_t)) + epoch % 2 * early_bytes();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t early_scales_offset(uint32_t epoch) const {
    return early_rows_offset(epoch) + align(early_tokens() * early_row_bytes);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t early_weights_offset(uint32_t epoch, uint32_t source)
      const {
    return early_scales_offset(epoch) + align(early_tokens() * kEarlyScaleBytes) +
           sizeof(float) * source * max_tokens * max_topk;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const {
    return early_rows_offset(0) + 2 * early_bytes();
  }

 private:
  [[nodiscard]] WEFT_HD constexpr uint64_t early_tokens() const {
    return early_row_bytes == 0 ? 0 : uint64_t{num_ranks} * max_tokens;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t early_bytes() const {
    return align(early_tokens() * early_row_bytes) + align(early_tokens() * kEarlyScaleBytes) +
           align(early_tokens() * max_topk * sizeof(float));
  }
};

enum class FaultKind : uint32_t {
  kNone,
  kTimeout,   // `peer` has not raised the signal
  kMismatch,  // field `what` of the signature: `seen` at the peer, `wanted` here
  kRefused,   // the peer's word says so
  kBadIndex,  // topk_idx[token = seen, k = what] is `wanted`
  kTooMany,   // a map's row `seen` has more than max_topk = `wanted` experts
  kStranger,  // the peer's word has the stamp `seen`, this exchange `wanted`
  kUnmapped,  // the peer names its region `seen`, which is not mapped here
};

// Where an exchange begins to count. The low bits of stamps are numbers of exchanges, so that what
// an earlier one left in memory that a later one got lies behind and is not reached: but for one
// exchange in 4096, and after some 65536 calls.
WEFT_HD constexpr uint32_t epoch_base(uint64_t stamp) {
  return static_cast<uint32_t>(stamp % 4096) << 16;
}

// What a wait was for.
enum class WaitFor : uint32_t { kWord, kRecords, kSourceWeights, kRows, kGrid };

// In pinned host memory; `kind` is stored last. The first fault of a call wins.
struct FaultRecord {
  FaultKind kind = FaultKind::kNone;
  DeviceOp op = DeviceOp::kNone;
  uint32_t epoch = 0;
  int32_t peer = -1;
  WaitFor waiting_for = WaitFor::kWord;
  int32_t what = 0;
  int64_t seen = 0;
  int64_t wanted = 0;
  uint64_t control = 0;  // address of this rank's control region, as the kernel knew it
};

// What the first fault of a rank does to its calls.
enum class StopState : uint32_t {
  kRunning,
  kGivenUp,  // a call is given up by all ranks; so are those queued behind it, until the host
             // clears it
  kBroken,   // a peer did not come: no wait is worth its time
};

// A rank's own device memory that only its kernels (and its host, between calls) touch.
struct LocalState {
  uint32_t epoch = 0;  // of the last finished call
  uint32_t done = 0;   // blocks of the running call that are through
  uint32_t grid = 0;   // blocks that reached the grid barrier of the running call
  StopState stopped = StopState::kRunning;  // set by the first fault
  uint32_t told = 0;  // epoch of the last plan whose counts are on their way to the peers
  uint64_t wait_ns[kMaxDomainRanks] = {};  // by peer
};

// What every kernel knows of its rank; passed by value.
struct RankView {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  DeviceControlMap map;
  uint64_t stamp = 0;  // the same on all ranks, and of no other exchange
  // Region 0 of every rank as mapped here. It never changes, so that words and signals depend on no
  // table, whose entries change while kernels run.
  std::byte* control[kMaxDomainRanks] = {};
  std::byte* const* regions =
      nullptr;  // device memory, [num_ranks][kMaxPeerRegions] as mapped here
  LocalState* local = nullptr;
  FaultRecord* fault = nullptr;
  uint64_t timeout_ns = 0;
  uint32_t poll_ns = 100;  // between two looks at a signal
};

}  // namespace weft
