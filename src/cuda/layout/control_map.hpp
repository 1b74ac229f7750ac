// SPDX-License-Identifier: Apache-2.0
// Where everything lies in a rank's control region, the device memory through which the GPUs of a
// domain tell each other about calls: byte offsets, for host and device alike. Peers write the
// region, its owner reads it. It starts all zero and nothing in it is ever reset.
//
// Every call has a number, its epoch, which the kernels themselves count on each GPU, so that a
// replayed graph goes on counting. A signal is raised by storing the epoch of the call: it says
// "done up to this call", and a signal that a failed call never raised does not confuse the next.
//
//   signals     see SignalSlots
//   words       [2 parities][num_ranks]  DeviceHandshake, the handshake of a call; of a plan call
//   also
//               arrivals [num_ranks] and routes [num_experts] int32
//   weights     [num_ranks][max_tokens][max_topk] fp32 by (source, arrival, k): of dispatch, or of
//               kSourceWeights
//   returned    [max_tokens][max_topk] fp32 by (token, k): weight gradients of combine
//   stamp       uint64 of the exchange, written by the owner when the exchange is made
//   eager       [2 parities] eager rows, of calls that write before any handshake has come: rows,
//               scale rows and weights [max_topk] of [num_ranks * max_tokens] tokens. A dispatch
//               that makes its plan orders them by (source, token), combine as in staging and
//               `returned`
//   routing     [2 parities][num_ranks]  RoutingMap: all routing of a source, for a plan that every
//               rank makes by itself
//   eager slots [num_ranks][max_tokens * max_topk]  EagerSlot: where eager rows go on this rank
//   copied      [2 areas][num_ranks]  CopiedRows of a source, brought by its copy engines
//
// The handshake of a parity may be overwritten two calls later: by then every rank has read it,
// because no kernel ends before it has seen the handshakes of all ranks. The same holds for eager
// rows and routing, which are written before any handshake of their call has come. Rows that copy
// engines bring are also written before, to the two areas in turn: between two calls that use the
// same area there is another call, which the reader entered after the first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call/chunks.hpp"
#include "call/signature.hpp"
#include "core/gpu/peer_address.hpp"
#include "core/hd.hpp"

namespace weft {

enum class WordStatus : uint32_t {
  kGood,
  kRefused,  // this rank does not run the call; every rank gives it up
};

// The handshake: what a rank tells each other rank before the data of a call.
struct alignas(16) DeviceHandshake {
  Op op = Op::kNone;
  WordStatus status = WordStatus::kGood;
  int32_t num_tokens = 0;
  Place place = Place::kStaging;
  PeerAddress rows;  // plan: the sender's plan block; dispatch: its output or staging; combine: its
                     // staging
  PeerAddress scales;   // dispatch: staging
  int64_t number = -1;  // plan: row budget, -1: none; by copy engines: see CopiedLaunch
  Signature signature;  // must be equal on all ranks
  uint64_t stamp = 0;   // of the sender's exchange
};

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
  // This signal holds no epoch but a number of its own: a stream raises it behind the copies of a
  // call.
  [[nodiscard]] WEFT_HD constexpr uint32_t copied(uint32_t source) const {
    return 4 * num_ranks + 2 * num_ranks * max_chunks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const {
    return 5 * num_ranks + 2 * num_ranks * max_chunks;
  }
};

// The most memory for eager rows, which only short calls have: in longer ones the transfer takes
// longer than making the plan. Both limits are guesses.
inline constexpr uint64_t kMaxEagerBytes = 256 << 20;
inline constexpr uint32_t kMaxEagerRoutes = 32768;  // of all ranks: shared memory holds them

// Bytes of an eager row of 16-bit elements; 0 where there is to be no room for eager rows.
WEFT_HD constexpr uint32_t eager_row_room(
    uint64_t num_ranks, uint64_t max_tokens, uint64_t max_topk, uint64_t hidden
) {
  const uint64_t row = half_row_bytes(hidden);
  const bool fits = is_short_call(static_cast<int64_t>(max_tokens)) &&
                    num_ranks * max_tokens * max_topk <= kMaxEagerRoutes &&
                    2 * num_ranks * max_tokens * (row + kScaleRoom) <= kMaxEagerBytes;
  return fits ? static_cast<uint32_t>(row) : 0;
}

// Bytes that copy engines bring of a token: a row of 16-bit elements, a row of scales, weights.
WEFT_HD constexpr uint64_t copied_token_room(uint64_t max_topk, uint64_t hidden) {
  return half_row_bytes(hidden) + kScaleRoom + max_topk * sizeof(float);
}

// A rank's routing in the memory of another: words of 64 bits, of which the upper half is the epoch
// of the call. Offsets in words.
struct RoutingMap {
  uint32_t max_routes = 0;

  static constexpr uint32_t kNumTokens = 0;
  static constexpr uint32_t kRowBudget = 1;  // int32, -1: none
  static constexpr uint32_t kFields = 2;

  // Words of route token * topk + k: its expert (int32; anything out of range stands for what the
  // caller should not have passed) and its weight (float).
  [[nodiscard]] WEFT_HD static constexpr uint32_t experts() { return kFields; }
  [[nodiscard]] WEFT_HD constexpr uint32_t weights() const { return kFields + max_routes; }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const { return kFields + 2 * max_routes; }
};

// Where a token of a source goes on this rank: its i-th row here, by ascending slot.
struct alignas(8) EagerSlot {
  int32_t slot = -1;  // -1: it has fewer
  int32_t k = 0;
};

// Offsets in bytes, computed once, as those of PlanMap are. Everything is aligned to 128 bytes, a
// cache line of the GPU.
struct DeviceControlMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t max_tokens = 1;
  uint32_t max_topk = 1;
  uint32_t eager_row_bytes = 0;     // 0: no room for eager rows
  uint64_t copied_token_bytes = 0;  // 0: no room for rows that copy engines bring

  constexpr DeviceControlMap() : DeviceControlMap(1, 1, 1, 1) {}
  constexpr DeviceControlMap(
      uint32_t ranks,
      uint32_t experts,
      uint32_t tokens,
      uint32_t topk,
      uint32_t eager_row_room = 0,
      uint64_t copied_token_room = 0
  )
      : num_ranks(ranks),
        num_experts(experts),
        max_tokens(tokens),
        max_topk(topk),
        eager_row_bytes(eager_row_room),
        copied_token_bytes(copied_token_room) {
    max_chunks_ = most_device_chunks(max_tokens);
    const uint64_t token_weights = sizeof(float) * max_tokens * max_topk;
    const uint64_t eager_tokens = eager_row_bytes == 0 ? 0 : uint64_t{num_ranks} * max_tokens;
    word_stride_ = align(sizeof(DeviceHandshake) + sizeof(int32_t) * (num_ranks + num_experts));
    weights_stride_ = align(token_weights);
    eager_weights_stride_ = token_weights;
    routing_stride_ = align(sizeof(uint64_t) * routing().size());
    eager_slots_stride_ = align(sizeof(EagerSlot) * routing().max_routes);
    words_ = align(sizeof(uint32_t) * signals().size());
    weights_ = words_ + 2 * num_ranks * word_stride_;
    eager_ = stamp_offset() + align(sizeof(uint64_t));
    eager_scales_ = align(eager_tokens * eager_row_bytes);
    eager_weights_ = eager_scales_ + align(eager_tokens * kScaleRoom);
    eager_stride_ = eager_weights_ + align(eager_tokens * max_topk * sizeof(float));
    routing_ = eager_ + 2 * eager_stride_;
    copied_ = align(eager_row_bytes == 0 ? eager_ : eager_slots_offset(num_ranks));
    copied_stride_ = align(max_tokens * copied_token_bytes);
  }

  [[nodiscard]] WEFT_HD static constexpr uint64_t align(uint64_t value) {
    return (value + 127) / 128 * 128;
  }
  [[nodiscard]] WEFT_HD constexpr SignalSlots signals() const { return {num_ranks, max_chunks_}; }
  [[nodiscard]] WEFT_HD constexpr uint64_t word_stride() const { return word_stride_; }
  [[nodiscard]] WEFT_HD constexpr uint64_t word_offset(uint32_t epoch, uint32_t source) const {
    return words_ + (epoch % 2 * num_ranks + source) * word_stride_;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t weights_offset(uint32_t source) const {
    return weights_ + source * weights_stride_;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t returned_offset(uint32_t epoch, bool is_eager) const {
    return is_eager ? eager_weights_offset(epoch, 0) : weights_offset(num_ranks);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t stamp_offset() const {
    return weights_offset(num_ranks + 1);
  }
  // Eager rows, scale rows and weights of all sources in a call's parity, [num_ranks * max_tokens]
  // each; rows and scale rows are as long as the call's.
  [[nodiscard]] WEFT_HD constexpr uint64_t eager_rows_offset(uint32_t epoch) const {
    return eager_ + epoch % 2 * eager_stride_;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t eager_scales_offset(uint32_t epoch) const {
    return eager_rows_offset(epoch) + eager_scales_;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t eager_weights_offset(uint32_t epoch, uint32_t source)
      const {
    return eager_rows_offset(epoch) + eager_weights_ + source * eager_weights_stride_;
  }
  [[nodiscard]] WEFT_HD constexpr RoutingMap routing() const {
    return {eager_row_bytes == 0 ? 0 : max_tokens * max_topk};
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t routing_offset(uint32_t epoch, uint32_t source) const {
    return routing_ + (epoch % 2 * num_ranks + source) * routing_stride_;
  }
  // EagerSlot [num_ranks][max_tokens * max_topk], of this rank's own use within a call.
  [[nodiscard]] WEFT_HD constexpr uint64_t eager_slots_offset(uint32_t source) const {
    return routing_offset(1, num_ranks) + source * eager_slots_stride_;
  }
  // Bytes from one source's rows of copy engines to the next one's.
  [[nodiscard]] WEFT_HD constexpr uint64_t copied_stride() const { return copied_stride_; }
  [[nodiscard]] WEFT_HD constexpr uint64_t copied_offset(uint32_t area, uint32_t source) const {
    return copied_ + (area * num_ranks + source) * copied_stride_;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const { return copied_offset(2, 0); }

 private:
  uint32_t max_chunks_ = 0;
  uint64_t words_ = 0;
  uint64_t word_stride_ = 0;
  uint64_t weights_ = 0;
  uint64_t weights_stride_ = 0;
  uint64_t eager_ = 0;  // of a parity; what follows is within it
  uint64_t eager_stride_ = 0;
  uint64_t eager_scales_ = 0;
  uint64_t eager_weights_ = 0;
  uint64_t eager_weights_stride_ = 0;
  uint64_t routing_ = 0;
  uint64_t routing_stride_ = 0;
  uint64_t eager_slots_stride_ = 0;
  uint64_t copied_ = 0;
  uint64_t copied_stride_ = 0;
};

}  // namespace weft
