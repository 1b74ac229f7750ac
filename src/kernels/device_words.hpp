// SPDX-License-Identifier: Apache-2.0
// What the GPUs of a domain say to each other before and beside the data of a call: its word and
// its signals, for host and device alike.
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
  kCopied,       // by copy engines, in blocks: a block of the receiver's, by source
};

inline constexpr int kDeviceSignatureFields = 10;

struct alignas(16) DeviceWord {
  DeviceOp op = DeviceOp::kNone;
  WordStatus status = WordStatus::kGood;
  int32_t num_tokens = 0;
  DevicePlace place = DevicePlace::kStaging;
  PeerAddress rows;  // plan: the sender's plan block; dispatch: its output or staging; combine: its
                     // staging
  PeerAddress scales;   // dispatch: staging
  int64_t number = -1;  // plan: row budget, -1: none; by copy engines: see CopiedLaunch
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
  // No epoch, but a number of its own: a stream raises it behind the copies of a call.
  [[nodiscard]] WEFT_HD constexpr uint32_t copied(uint32_t source) const {
    return 4 * num_ranks + 2 * num_ranks * max_chunks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const {
    return 5 * num_ranks + 2 * num_ranks * max_chunks;
  }
};

}  // namespace weft
