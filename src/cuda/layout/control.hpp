// SPDX-License-Identifier: Apache-2.0
// What every kernel knows of its rank besides the parameters of its call (RankView), and the record
// in which a kernel tells the host what went wrong (FaultRecord). The host fills it in
// exchange/exchange.cpp; device/wait.cuh uses it.
#pragma once

#include "cuda/layout/control_map.hpp"

namespace weft {

enum class FaultKind : uint32_t {
  kNone,
  kTimeout,   // `peer` has not raised the signal
  kMismatch,  // field `what` of the signature: `seen` at the peer, `wanted` here
  kRefused,   // the peer's handshake says that it does not run the call
  kBadIndex,  // topk_idx[token = seen, k = what] is `wanted`
  kTooMany,   // a map's row `seen` has more than max_topk = `wanted` experts
  kStranger,  // the peer's handshake has the stamp `seen`, this exchange has `wanted`
  kUnmapped,  // the peer names its region `seen`, which is not mapped here
};

// The epoch from which an exchange counts. The low bits of stamps are numbers of exchanges, so that
// a signal that an earlier exchange left in memory does not look raised to a later one. It may do
// so for one exchange in 4096, or after 65536 calls: the 32 bits of an epoch are divided like this
// by a guess.
WEFT_HD constexpr uint32_t epoch_base(uint64_t stamp) {
  return static_cast<uint32_t>(stamp % 4096) << 16;
}

// What a wait was for. kWord: a handshake.
enum class WaitFor : uint32_t { kWord, kRouting, kRecords, kSourceWeights, kRows, kCopies, kGrid };

// In pinned host memory; `kind` is stored last. The first fault of a call wins.
struct FaultRecord {
  FaultKind kind = FaultKind::kNone;
  Op op = Op::kNone;
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
  uint32_t epoch = 0;   // of the last finished call
  uint32_t done = 0;    // blocks of the running call that are through
  uint32_t grid = 0;    // of the running call: blocks, or what else its kernel counts, that have
                        // reached its barrier
  uint32_t placed = 0;  // parts of a plan made of all routing whose records are there
  StopState stopped = StopState::kRunning;  // set by the first fault
  uint64_t wait_ns[kMaxDomainRanks] = {};   // by peer
};

// What every kernel knows of its rank; passed by value.
struct RankView {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  DeviceControlMap map;
  uint64_t stamp = 0;  // the same on all ranks, and of no other exchange
  // Region 0 of every rank as mapped here. It never changes, so that handshakes and signals need no
  // table, whose entries may change while kernels run.
  std::byte* control[kMaxDomainRanks] = {};
  // Device memory [num_ranks][kMaxPeerRegions]: every region as mapped here.
  std::byte* const* regions = nullptr;
  LocalState* local = nullptr;
  FaultRecord* fault = nullptr;
  uint64_t timeout_ns = 0;
  uint32_t poll_ns = 100;  // between two looks at a signal; a guess
};

}  // namespace weft
