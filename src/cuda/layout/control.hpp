// SPDX-License-Identifier: Apache-2.0
// Layout of a rank's control region, the device memory through which the GPUs of a domain tell each
// other about calls: byte offsets, for host and device alike. Peers write the region, its owner
// reads it. It starts all zero and nothing in it is ever reset.
//
// Every call has a number, its epoch, which the kernels themselves count on each GPU, so that a
// replayed graph goes on counting. A signal is raised by storing the epoch of the call: it says
// "done up to this call", and a signal that a failed call never raised does not confuse the next.
// Signals hold the low 32 bits, compared by their distance, and are renewed before these come round
// (renew_signals in device/wait.cuh); the epoch of a plan, which may live for ever, has 64.
//
//   signals     see SignalSlots
//   words       [2 parities][num_ranks]  DeviceHandshake, the handshake of a call; of a plan call
//   also
//               arrivals [num_ranks] and routes [num_experts] int32
//   weights     [num_ranks][max_tokens][max_topk] fp32 by (source, arrival, k): of dispatch, or of
//               kSourceWeights where rows are not eager
//   returned    [max_tokens][max_topk] fp32 by (token, k): weight gradients of combine
//   stamp       uint64 of the exchange, written by the owner when the exchange is made
//   eager       [2 parities] eager rows, of calls that write before any handshake has come: rows,
//               scale rows and weights [max_topk] of [num_ranks * max_tokens] tokens. A dispatch
//               that makes its plan orders them by (source, token), combine as in staging and
//               `returned`, or by (token, k) where a row returns for each route, if there is room
//   routing     [2 parities][num_ranks]  RoutingMap: all routing of a source, for a plan that every
//               rank makes by itself; or only its weights, of kSourceWeights beside eager rows
//   eager slots [num_ranks][max_tokens * max_topk]  EagerSlot: where eager rows go on this rank
//   copied      [2 areas][num_ranks]  CopiedRows of a source, brought by its copy engines
//   second      [2 parities][num_ranks]  words like those above, by physical expert: the second
//   words       handshake of a plan with replicas
//
// The handshake of a parity may be overwritten two calls later: by then every rank has read it,
// because no kernel ends before it has seen the handshakes of all ranks. The same holds for eager
// rows and routing, which are written before any handshake of their call has come. Rows that copy
// engines bring are also written before, to the two areas in turn: between two calls that use the
// same area there is another call, which the reader entered after the first.
//
// At the end is what every kernel knows of its rank besides the parameters of its call (RankView),
// and the record in which a kernel tells the host what went wrong (FaultRecord). The host fills it
// in exchange/exchange.cpp; device/wait.cuh uses it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "call/chunks.hpp"
#include "call/payload.hpp"
#include "call/signature.hpp"
#include "core/gpu/peer_address.hpp"
#include "core/hd.hpp"
#include "weft/plan.hpp"

namespace weft {

enum class WordStatus : uint32_t {
  kGood,
  kRefused,  // this rank does not run the call; every rank gives it up
  kSilent,   // it is not even posted: this rank has broken off, and a peer that is late may still
             // need the handshake that it would replace
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

// Indices of the uint32 signals of a rank; `source` is the rank that raises. `records` has two of
// them, for the 64 bits of a plan's epoch.
struct SignalSlots {
  uint32_t num_ranks = 1;
  uint32_t max_chunks = 1;

  [[nodiscard]] WEFT_HD constexpr uint32_t word(uint32_t epoch, uint32_t source) const {
    return epoch % 2 * num_ranks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t records(uint32_t source) const {
    return 2 * num_ranks + 2 * source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t source_weights(uint32_t source) const {
    return 4 * num_ranks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t dispatch(int source, int chunk) const {
    return 5 * num_ranks + static_cast<uint32_t>(source) * max_chunks +
           static_cast<uint32_t>(chunk);
  }
  // `chunk` of the reader's own tokens.
  [[nodiscard]] WEFT_HD constexpr uint32_t combine(int source, int chunk) const {
    return num_ranks * max_chunks + dispatch(source, chunk);
  }
  // copied() and copying() hold the number of a call's copies, no epoch: a stream raises copied()
  // behind the copies, the kernel before them copying().
  [[nodiscard]] WEFT_HD constexpr uint32_t copied(uint32_t source) const {
    return 5 * num_ranks + 2 * num_ranks * max_chunks + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t copying(uint32_t source) const {
    return copied(num_ranks) + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t second_word(uint32_t epoch, uint32_t source) const {
    return copying(num_ranks) + epoch % 2 * num_ranks + source;
  }
  // Says that the source has all that it needs of its calls so far (GateState).
  [[nodiscard]] WEFT_HD constexpr uint32_t whole(uint32_t source) const {
    return second_word(1, num_ranks) + source;
  }
  [[nodiscard]] WEFT_HD constexpr uint32_t size() const { return whole(num_ranks); }
  // Value of size() even where 32 bits do not hold it.
  [[nodiscard]] constexpr uint64_t needed() const {
    return uint64_t{num_ranks} * (uint64_t{2} * max_chunks + 10);
  }
};

// The most memory for eager rows, which only short calls have: in longer ones the transfer takes
// longer than making the plan. Both limits are guesses.
inline constexpr uint64_t kMaxEagerBytes = 256 << 20;
inline constexpr uint32_t kMaxEagerRoutes = 32768;  // of all ranks: shared memory holds them

// Returns the bytes of an eager row of 16-bit elements; 0 for no room for eager rows.
WEFT_HD constexpr uint32_t eager_row_room(
    uint64_t num_ranks, uint64_t max_tokens, uint64_t max_topk, uint64_t hidden
) {
  const uint64_t row = half_row_bytes(hidden);
  const bool fits = is_short_call(static_cast<int64_t>(max_tokens)) &&
                    num_ranks * max_tokens * max_topk <= kMaxEagerRoutes &&
                    2 * num_ranks * max_tokens * (row + kScaleRoom) <= kMaxEagerBytes;
  return fits ? static_cast<uint32_t>(row) : 0;
}

// Returns the bytes that copy engines bring of a token: 16-bit elements, scales, weights.
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

// Place of a source's token on this rank: its i-th row here, by ascending slot.
struct alignas(8) EagerSlot {
  int32_t slot = -1;   // -1: it has fewer
  int32_t origin = 0;  // as in a plan
};

// Offsets in bytes, computed once, as those of PlanMap are. Everything is aligned to 128 bytes, a
// cache line of the GPU.
struct DeviceControlMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t max_tokens = 1;
  uint32_t max_topk = 1;
  uint32_t eager_row_bytes = 0;     // 0: no room for eager rows
  bool has_route_rows = false;      // there is room for a row of each route of a rank
  uint64_t copied_token_bytes = 0;  // 0: no room for rows that copy engines bring
  uint64_t word_stride = 0;         // from one source's handshake to the next one's
  uint64_t copied_stride = 0;       // from one source's rows of copy engines to the next one's

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
    const uint64_t routes = uint64_t{max_tokens} * max_topk;
    const uint64_t route_bytes = 2 * routes * (eager_row_bytes + kScaleRoom);
    has_route_rows =
        eager_row_bytes > 0 && (routes <= eager_tokens || route_bytes <= kMaxEagerBytes);
    const uint64_t eager_rows = has_route_rows && routes > eager_tokens ? routes : eager_tokens;
    word_stride = align(sizeof(DeviceHandshake) + sizeof(int32_t) * (num_ranks + num_experts));
    weights_stride_ = align(token_weights);
    eager_weights_stride_ = token_weights;
    routing_stride_ = align(sizeof(uint64_t) * routing().size());
    eager_slots_stride_ = align(sizeof(EagerSlot) * routing().max_routes);
    words_ = align(sizeof(uint32_t) * signals().size());
    weights_ = words_ + 2 * num_ranks * word_stride;
    eager_ = stamp_offset() + align(sizeof(uint64_t));
    eager_scales_ = align(eager_rows * eager_row_bytes);
    eager_weights_ = eager_scales_ + align(eager_tokens * kScaleRoom);
    eager_stride_ = eager_weights_ + align(eager_tokens * max_topk * sizeof(float));
    routing_ = eager_ + 2 * eager_stride_;
    copied_ = align(eager_row_bytes == 0 ? eager_ : eager_slots_offset(num_ranks));
    copied_stride = align(max_tokens * copied_token_bytes);
  }

  [[nodiscard]] WEFT_HD static constexpr uint64_t align(uint64_t value) {
    return (value + 127) / 128 * 128;
  }
  [[nodiscard]] WEFT_HD constexpr SignalSlots signals() const { return {num_ranks, max_chunks_}; }
  [[nodiscard]] WEFT_HD constexpr uint64_t word_offset(uint32_t epoch, uint32_t source) const {
    return words_ + (epoch % 2 * num_ranks + source) * word_stride;
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
  [[nodiscard]] WEFT_HD constexpr uint64_t copied_offset(uint32_t area, uint32_t source) const {
    return copied_ + (area * num_ranks + source) * copied_stride;
  }
  // Offsets that few calls need are computed each time: whatever is stored here is a parameter of
  // every kernel, and where there are few tokens, to fetch those takes time.
  [[nodiscard]] WEFT_HD constexpr uint64_t second_word_stride() const {
    return word_stride + align(sizeof(int32_t) * kMostReplicas * num_ranks);
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t second_word_offset(uint32_t epoch, uint32_t source)
      const {
    return copied_offset(2, 0) + (epoch % 2 * num_ranks + source) * second_word_stride();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const {
    return second_word_offset(1, num_ranks);
  }

 private:
  uint32_t max_chunks_ = 0;
  uint64_t words_ = 0;
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
};

// Part of a call that a launch makes: all of it; what a rank sends, which waits for no rank; or the
// rest, by a later launch of the same parameters with no other call between.
enum class CallPart : uint8_t { kAll, kSend, kReceive };

// Block that one rank sends another in a call by copy engines, as it lies in memory on both sides:
// rows, then scale rows, then weights, each by arrival.
struct CopiedRows {
  int64_t row_bytes = 0;     // as it arrives
  int64_t scale_bytes = 0;   // PayloadFormat::staged_scale_bytes(); 0: none
  int64_t weight_bytes = 0;  // of all weights of an arrival; 0: none

  [[nodiscard]] WEFT_HD constexpr int64_t scales_offset(int64_t arrivals) const {
    return arrivals * row_bytes;
  }
  [[nodiscard]] WEFT_HD constexpr int64_t weights_offset(int64_t arrivals) const {
    return arrivals * (row_bytes + scale_bytes);
  }
  [[nodiscard]] WEFT_HD constexpr int64_t num_bytes(int64_t arrivals) const {
    return arrivals * (row_bytes + scale_bytes + weight_bytes);
  }
};

// Combine's sum role packs a rank (below kMaxDomainRanks) and the number of its arrival into 31
// bits.
inline constexpr int kCopiedArrivalBits = 24;

[[nodiscard]] inline CopiedRows copied_rows(const PayloadFormat& payload) {
  return {payload.out_row_bytes(), payload.staged_scale_bytes(), payload.weight_bytes};
}

// Parameters of a call's copies that its kernels need.
struct CopiedLaunch {
  CopiedRows rows;
  uint32_t number = 0;          // what SignalSlots::copied() says then, of this rank's copies
  uint32_t area = 0;            // which of every receiver's two
  std::byte* packed = nullptr;  // [num_ranks - 1] blocks of DeviceControlMap::copied_stride, in
                                // order from the next rank on
};

enum class FaultKind : uint32_t {
  kNone,
  kTimeout,    // `peer` has not raised the signal
  kMismatch,   // field `what` of the signature: `seen` at the peer, `wanted` here
  kRefused,    // the peer's handshake says that it does not run the call
  kBadIndex,   // topk_idx[token = seen, k = what] is `wanted`
  kTooMany,    // a map's row `seen` has more than max_topk = `wanted` experts
  kStranger,   // the peer's handshake has the stamp `seen`, this exchange has `wanted`
  kUnmapped,   // the peer names its region `seen`, which is not mapped here
  kGone,       // the peer has broken off and is calls ahead: its rows may be those of another call
  kOldPlan,    // the plan is of LocalState::members `seen`, this call of `wanted`
  kOtherPlan,  // the plan's block holds the plan of serial `seen` (0: none), the call is by
               // `wanted`
  kOldGraph,   // of a graph that was captured before a lost rank's new process had other addresses
  kOtherChoice,     // source_idx[token = seen, k = what] is `wanted`, the plan's choice is `block`
  kBadGlobalScale,  // the fp32 with the bits `seen`
};

// Returns the epoch from which an exchange counts. The low bits of stamps are numbers of exchanges,
// so that a signal that an earlier exchange left in memory does not look raised to a later one. It
// may do so for one exchange in 4096, or after 65536 calls: the 32 bits of an epoch are divided
// like this by a guess.
WEFT_HD constexpr uint32_t epoch_base(uint64_t stamp) {
  return static_cast<uint32_t>(stamp % 4096) << 16;
}

// Object of a wait. kWord: a handshake.
enum class WaitFor : uint32_t {
  kWord,
  kRouting,
  kRecords,
  kSourceWeights,
  kRows,
  kCopies,
  kWhole,  // the end of a call on the peer (GateState)
  kGrid,
  kStage,  // a row, or room for one, in shared memory
  kMark    // of a block of an expert's rows (RowMarks); FaultRecord::what and block say which
};

// Record of a fault, in pinned host memory; `kind` is stored last. The first fault of a call wins.
// Two kinds are no faults: kOtherChoice and kBadGlobalScale are told of calls that go on, in a
// record of their own.
struct FaultRecord {
  FaultKind kind = FaultKind::kNone;
  Op op = Op::kNone;
  uint32_t epoch = 0;
  int32_t peer = -1;
  WaitFor waiting_for = WaitFor::kWord;
  int32_t what = 0;
  int32_t block = 0;
  int64_t seen = 0;
  int64_t wanted = 0;
  uint64_t control = 0;  // address of this rank's control region, as the kernel knew it
};

// Effect of a rank's faults on its calls; the worst one counts.
enum class StopState : uint32_t {
  kRunning,
  kGivenUp,  // a call is given up by all ranks; so are those queued behind it, until the host
             // clears it
  kBroken,   // a peer did not come: no wait is worth its time
};

// With PeerLoss::kRepeat: a kernel behind each call, its gate, waits until all ranks have all that
// they need of the call. If kernels are stopped meanwhile, it holds what is queued behind it until
// the host has made the call again.
struct GateState {
  uint64_t passed = 0;   // the last call that all ranks have all of, as far as this one knows
  uint64_t whole = 0;    // the last of which this rank has all, as it has told the others
  uint64_t number = 0;   // of the gate that holds, as its launch has it
  uint32_t is_held = 0;  // 1: until the host, or the gate of the call made again, clears it
  uint32_t is_off = 0;   // 1: none holds, as calls are not made again but void
};

// A rank's own device memory that only its kernels (and its host, between calls) touch.
struct alignas(8) LocalState {
  uint32_t epoch = 0;       // of the last finished call
  uint32_t epoch_high = 0;  // its upper half
  uint32_t done = 0;        // blocks of the running call that are through
  uint32_t grid = 0;      // of the running call: blocks, or what else its kernel counts, that have
                          // reached its barrier
  uint32_t placed = 0;    // parts of a plan made of all routing whose slots are there, and one more
                          // when the handshakes are accepted
  uint32_t recorded = 0;  // such parts whose records are there
  uint32_t goes_on = 0;   // whether a plan with replicas does after its first half: 0 or 1
  StopState stopped = StopState::kRunning;  // set by the first fault
  uint32_t given_up_epoch = 0;              // of the call that made it kGivenUp
  uint32_t broken_epoch = 0;                // of the one that made it kBroken
  uint32_t misused_epoch = 0;               // of the last one with a misuse (tell_misuse)
  // With PeerLoss::kShrink; only the host changes them. Bit r: rank r takes no part. All bits, this
  // rank's own too: of kernels in old graphs alone, whose addresses of peers are no longer right,
  // and which are stopped besides.
  uint32_t lost = 0;
  uint32_t members = 0;                    // how often those that take part have changed
  uint64_t wait_ns[kMaxDomainRanks] = {};  // by peer
  uint64_t routed = 0;  // the last call whose plan has this rank's routes to physical experts, of
                        // those that plan replicas beside their dispatch
  GateState gate;
  uint32_t has_gates = 0;
};

// State of a rank that each of its kernels gets, passed by value.
struct RankView {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  DeviceControlMap map;
  uint64_t stamp = 0;  // the same on all ranks, and of no other exchange
  // Region 0 of every rank as mapped here, so that handshakes and signals need no table, whose
  // entries may change while kernels run. Once a lost rank's new process has another one, what was
  // captured before has a LocalState of its own, by which it does nothing (FaultKind::kOldGraph).
  std::byte* control[kMaxDomainRanks] = {};
  // Device memory [num_ranks][kMaxPeerRegions]: every region as mapped here.
  std::byte* const* regions = nullptr;
  // Host memory of the same shape: what is new is here first.
  std::byte* const* new_regions = nullptr;
  LocalState* local = nullptr;
  FaultRecord* fault = nullptr;  // and, behind it, the record of what is none
  uint64_t timeout_ns = 0;
  uint32_t poll_ns = 100;            // between two looks at a signal; a guess
  uint32_t look_ns = 1'000'000'000;  // that one at the clock counts for, at most (Patience)
};

}  // namespace weft
