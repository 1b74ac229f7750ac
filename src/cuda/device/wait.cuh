// SPDX-License-Identifier: Apache-2.0
// How a GPU rank waits for its peers, with a deadline, and how a call begins, fails and ends on the
// device. Signals are numbers in the waiting rank's control region (layout/control.hpp) that
// peers store; docs/memory_model.md pairs each store with the wait for it. Every kernel of the
// executor includes this file.
#pragma once

#include "cuda/device/ptx/memory.cuh"
#include "cuda/layout/control.hpp"
#include "cuda/layout/patience.hpp"

namespace weft {

// Returns an entry of the table of regions, or of the table in host memory if the copy has yet to
// arrive. It is read from the L2 cache, where the host's copies arrive, never from an L1 cache that
// may hold an earlier table at this address.
__device__ __forceinline__ std::byte* region_of(const RankView& me, int rank, uint32_t region) {
  const uint32_t index = static_cast<uint32_t>(rank) * kMaxPeerRegions + region;
  uint64_t entry = __ldcg(reinterpret_cast<const unsigned long long*>(me.regions + index));
  if (entry == 0) {
    entry = ptx::load_acquire_sys(reinterpret_cast<const uint64_t*>(me.new_regions + index));
  }
  return reinterpret_cast<std::byte*>(entry);
}

__device__ __forceinline__ std::byte* control_of(const RankView& me, int rank) {
  return me.control[rank];
}

// Returns the address of signal `slot` of `rank`.
__device__ __forceinline__ uint32_t* signal_of(const RankView& me, int rank, uint32_t slot) {
  return reinterpret_cast<uint32_t*>(control_of(me, rank)) + slot;
}

// Returns the address of the epoch up to which `rank`'s plans have the records of `source`.
__device__ __forceinline__ uint64_t* records_of(const RankView& me, int rank, int source) {
  const auto slot = me.map.signals().records(static_cast<uint32_t>(source));
  return reinterpret_cast<uint64_t*>(signal_of(me, rank, slot));
}

__device__ __forceinline__ DeviceHandshake* word_of(
    const RankView& me, int owner, uint32_t epoch, int source
) {
  return reinterpret_cast<DeviceHandshake*>(
      control_of(me, owner) + me.map.word_offset(epoch, static_cast<uint32_t>(source))
  );
}

// Returns whether `seen` is at or behind `wanted`. Epochs of 32 bits wrap, so distance decides.
__device__ __forceinline__ bool is_reached(uint32_t seen, uint32_t wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}
__device__ __forceinline__ bool is_reached(uint64_t seen, uint64_t wanted) {
  return seen >= wanted;
}

__device__ __forceinline__ StopState stop_state(const RankView& me) {
  return *reinterpret_cast<volatile StopState*>(&me.local->stopped);
}

__device__ __forceinline__ bool is_stopped(const RankView& me) {
  return stop_state(me) != StopState::kRunning;
}

// Returns the ranks that take no part any more, a bit each. Nothing comes from these, they are told
// of no call, and no rank reads memory of theirs that is still written to.
__device__ __forceinline__ uint32_t lost_ranks(const RankView& me) {
  return me.local->lost;  // the host changes it while no kernel runs
}
__device__ __forceinline__ bool is_lost(const RankView& me, int rank) {
  return (lost_ranks(me) >> static_cast<uint32_t>(rank) & 1U) != 0;
}

// Writes a fault to the host's `record`, its kind last.
__device__ inline void tell(const RankView& me, FaultRecord* record, const FaultRecord& fault) {
  FaultRecord told = fault;
  told.kind = FaultKind::kNone;
  told.control = reinterpret_cast<uint64_t>(control_of(me, me.rank));
  *record = told;
  ptx::fence_sys();
  *reinterpret_cast<volatile FaultKind*>(&record->kind) = fault.kind;
}

__device__ inline void tell_fault(const RankView& me, const FaultRecord& fault) {
  tell(me, me.fault, fault);
}

// Tells the host, by one thread, of `misuse` in a call that goes on, unless the host has yet to
// read an earlier call's misuse.
__device__ inline void tell_misuse(const RankView& me, const FaultRecord& misuse) {
  FaultRecord* const record = me.fault + 1;
  const auto* told = reinterpret_cast<volatile FaultKind*>(&record->kind);
  if (atomicExch(&me.local->misused_epoch, misuse.epoch) != misuse.epoch &&
      *told == FaultKind::kNone) {
    tell(me, record, misuse);
  }
}

// Ends all waits of this rank's kernel; tells the host of the rank's first fault.
__device__ inline void raise_fault(const RankView& me, const FaultRecord& fault) {
  // A peer does not know that it is a stranger here, or that its region is missing: it goes on by
  // itself.
  const bool is_mutual = fault.kind != FaultKind::kTimeout && fault.kind != FaultKind::kStranger &&
                         fault.kind != FaultKind::kUnmapped && fault.kind != FaultKind::kGone;
  const StopState state = is_mutual ? StopState::kGivenUp : StopState::kBroken;
  const StopState seen = stop_state(me);
  if (state == StopState::kBroken && seen != StopState::kBroken) {
    me.local->broken_epoch = fault.epoch;  // the same of all threads that come here
    __threadfence();
  } else if (seen == StopState::kRunning) {
    me.local->given_up_epoch = fault.epoch;  // likewise
    __threadfence();
  }
  // A handshake that does not come to a call that is given up leaves the rank broken all the same:
  // its next calls would be two ahead of the peer's, and write over what the peer still reads.
  const auto before =
      atomicMax(reinterpret_cast<uint32_t*>(&me.local->stopped), static_cast<uint32_t>(state));
  if (before == static_cast<uint32_t>(StopState::kRunning)) {
    tell_fault(me, fault);
  }
}

struct WaitSite {
  Op op;
  uint32_t epoch;
  int peer;
  WaitFor waiting_for;
};

// Raises the fault of a wait at this site that has come to its deadline.
__device__ inline void raise_timeout(
    const RankView& me, const WaitSite& site, uint64_t seen, uint64_t wanted
) {
  const FaultRecord fault = {
      .kind = FaultKind::kTimeout,
      .op = site.op,
      .epoch = site.epoch,
      .peer = site.peer,
      .waiting_for = site.waiting_for,
      .seen = static_cast<int64_t>(seen),
      .wanted = static_cast<int64_t>(wanted)};
  raise_fault(me, fault);
}

// Returns memory that the site's peer names; null, with a fault, if this GPU does not map it.
__device__ inline std::byte* peer_data(
    const RankView& me, PeerAddress address, const WaitSite& site
) {
  std::byte* region = region_of(me, site.peer, address.region);
  if (region == nullptr) {
    const FaultRecord fault = {
        .kind = FaultKind::kUnmapped,
        .op = site.op,
        .epoch = site.epoch,
        .peer = site.peer,
        .seen = address.region};
    raise_fault(me, fault);
    return nullptr;
  }
  return region + address.offset;
}

// Waits, by one thread, until *signal has reached `wanted` (acquire, system scope). Returns false
// if the call is given up, by this wait's deadline or elsewhere on this rank; the caller then
// leaves its role. Waits for a lost rank end at once. A call that is given up still waits for
// handshakes, so that no rank gets two calls ahead of another. `times` multiplies the deadline, for
// waits whose timeout would say less than that of another wait for the same peer.
template <class Epoch>
__device__ inline bool wait_reached(
    const RankView& me, const Epoch* signal, Epoch wanted, const WaitSite& site, uint32_t times = 1
) {
  if (is_reached(ptx::load_acquire_sys(signal), wanted)) {
    return true;
  }
  if (is_lost(me, site.peer)) {
    return true;
  }
  Patience patience(ptx::clock_now());
  for (;;) {
    Epoch seen = 0;
#pragma unroll 1                    // what waits need not be fast, and code has to be fetched
    for (int i = 0; i < 32; ++i) {  // looks between looks at the clock: a guess
      __nanosleep(me.poll_ns);      // waiting warps shall leave the memory to working ones
      seen = ptx::load_acquire_sys(signal);
      if (is_reached(seen, wanted)) {
        atomicAdd(
            reinterpret_cast<unsigned long long*>(&me.local->wait_ns[site.peer]),
            static_cast<unsigned long long>(patience.look(ptx::clock_now(), me.look_ns))
        );
        return true;
      }
    }
    const StopState state = stop_state(me);
    if (state == StopState::kBroken ||
        (state == StopState::kGivenUp && site.waiting_for != WaitFor::kWord)) {
      return false;
    }
    if (patience.look(ptx::clock_now(), me.look_ns) > times * me.timeout_ns) {
      raise_timeout(me, site, seen, wanted);
      return false;
    }
  }
}

// Does wait_reached() for a warp: one lane polls, every lane gets the result.
__device__ __forceinline__ bool wait_reached_warp(
    const RankView& me, const uint32_t* signal, uint32_t wanted, const WaitSite& site
) {
  bool reached = true;
  if ((threadIdx.x & 31U) == 0) {
    reached = wait_reached(me, signal, wanted, site);
  }
  __syncwarp();  // what the one lane acquired is every lane's now
  return __shfl_sync(0xffffffffU, static_cast<int>(reached), 0) != 0;
}

// Returns the number of the running call: one more than the last that finished on this rank.
__device__ __forceinline__ uint64_t current_call(const RankView& me) {
  return *reinterpret_cast<volatile uint64_t*>(&me.local->epoch) + 1;
}
__device__ __forceinline__ uint32_t current_epoch(const RankView& me) {
  return *reinterpret_cast<volatile uint32_t*>(&me.local->epoch) + 1;
}

// Returns how many calls ago this rank broke off; 0: in this call, or never.
__device__ __forceinline__ uint32_t calls_since_break(const RankView& me, uint32_t epoch) {
  if (stop_state(me) != StopState::kBroken) {
    return 0;
  }
  ptx::fence_gpu();  // the number was there before the state
  return epoch - *reinterpret_cast<volatile uint32_t*>(&me.local->broken_epoch);
}

// Returns the status that this rank sends in the handshake of a call. A rank that did not wait for
// a peer is soon calls ahead, and two calls share the place of a handshake: the rank refuses the
// next call, and is silent in all after that.
__device__ __forceinline__ WordStatus own_status(const RankView& me, uint32_t epoch) {
  if (!is_stopped(me)) {
    return WordStatus::kGood;
  }
  // A peer would take kRefused for good, and this call is made again.
  const bool is_repeated = me.local->has_gates != 0 && stop_state(me) == StopState::kBroken;
  return is_repeated || calls_since_break(me, epoch) > 1 ? WordStatus::kSilent
                                                         : WordStatus::kRefused;
}

// Returns the status in a call of rows, in which any block may find a fault before the block that
// sends the handshake begins. Peers find a fault of this very call by themselves, if told what this
// rank called; a refusal would give them no reason.
__device__ __forceinline__ WordStatus own_status_at_begin(const RankView& me, uint32_t epoch) {
  const StopState state = stop_state(me);
  if (state == StopState::kRunning) {
    return WordStatus::kGood;
  }
  if (state == StopState::kBroken) {
    return own_status(me, epoch);
  }
  ptx::fence_gpu();  // the number was there before the state
  const auto given_up = *reinterpret_cast<volatile uint32_t*>(&me.local->given_up_epoch);
  return given_up == epoch ? WordStatus::kGood : WordStatus::kRefused;
}

// Returns whether this rank may write to its peers before their handshakes of this call have come.
// A rank that has broken off must not: a peer that did not come may still read what would be
// written over. A fault of this call does not forbid it: blocks that begin late still send their
// part, from which peers learn of the fault.
__device__ __forceinline__ bool may_write_ahead(const RankView& me, uint32_t epoch) {
  return calls_since_break(me, epoch) == 0;
}

// Every kRenewalCalls calls, at the ends of some in a row (a given-up call renews nothing), each
// rank renews what it has raised, as 32-bit epochs would look new again after so long a silence.
inline constexpr uint32_t kRenewalCalls = 1U << 28;
inline constexpr uint32_t kRenewalsInARow = 16;

// Renews signals, by one thread, when a call has ended on this rank: "done up to this call" is true
// of everything a call may raise. All ranks have read the routing of the call before.
__device__ __forceinline__ void renew_signals(const RankView& me, uint32_t epoch) {
  const SignalSlots slots = me.map.signals();
  const auto own = static_cast<uint32_t>(me.rank);
  ptx::fence_sys();
#pragma unroll 1
  for (int rank = 0; rank < me.num_ranks; ++rank) {
    if (is_lost(me, rank)) {
      continue;
    }
    ptx::store_relaxed_sys(signal_of(me, rank, slots.source_weights(own)), epoch);
    ptx::store_relaxed_sys(signal_of(me, rank, slots.second_word(0, own)), epoch);
    ptx::store_relaxed_sys(signal_of(me, rank, slots.second_word(1, own)), epoch);
#pragma unroll 1
    for (int chunk = 0; chunk < static_cast<int>(slots.max_chunks); ++chunk) {
      ptx::store_relaxed_sys(signal_of(me, rank, slots.dispatch(me.rank, chunk)), epoch);
      ptx::store_relaxed_sys(signal_of(me, rank, slots.combine(me.rank, chunk)), epoch);
    }
    auto* routing =
        reinterpret_cast<uint64_t*>(control_of(me, rank) + me.map.routing_offset(epoch - 1, own));
    const uint32_t num_words = me.map.eager_row_bytes == 0 ? 0 : me.map.routing().size();
#pragma unroll 1
    for (uint32_t i = 0; i < num_words; ++i) {
      ptx::store_relaxed_sys(routing + i, uint64_t{epoch - 1} << 32);
    }
  }
}

__device__ __noinline__ inline void renew_signals_apart(const RankView& me, uint32_t epoch) {
  renew_signals(me, epoch);
}

// Ends a kernel; every thread of every block calls it last. A function call for the rare renewal is
// cheap where calls are short, as 0.6 of the 16.5 us of case D planned and dispatched; but it takes
// registers from all that a kernel does, in combine 25 of 306 us on 24 multiprocessors (case A;
// both on one H200).
template <bool kRenewsApart = true>
__device__ inline void finish_call(const RankView& me, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t num_blocks = gridDim.x * gridDim.y * gridDim.z;
    if (ptx::add_acq_rel_gpu(&me.local->done, 1) == num_blocks - 1) {
      me.local->done = 0;
      me.local->grid = 0;
      me.local->placed = 0;
      me.local->recorded = 0;
      const auto* told = reinterpret_cast<volatile FaultKind*>(&me.fault->kind);
      if (is_lost(me, me.rank) && *told == FaultKind::kNone) {
        tell_fault(me, {.kind = FaultKind::kOldGraph, .epoch = epoch, .peer = me.rank});
      }
      if (epoch % kRenewalCalls < kRenewalsInARow && !is_stopped(me)) {
        if constexpr (kRenewsApart) {
          renew_signals_apart(me, epoch);
        } else {
          renew_signals(me, epoch);
        }
      }
      me.local->epoch = epoch;
      if (epoch == 0) {
        ++me.local->epoch_high;
      }
    }
  }
}

// Tells all ranks, by one thread after a fence, that this rank's records of a plan are there.
__device__ __forceinline__ void tell_records(const RankView& me, uint64_t call) {
  for (int rank = 0; rank < me.num_ranks; ++rank) {
    if (!is_lost(me, rank)) {
      ptx::store_relaxed_sys(records_of(me, rank, me.rank), call);
    }
  }
}

// Sends, by one thread, this rank's handshake to one peer.
__device__ inline void post_word(
    const RankView& me, uint32_t epoch, const DeviceHandshake& word, int peer
) {
  if (word.status == WordStatus::kSilent || is_lost(me, peer)) {
    return;
  }
  *word_of(me, peer, epoch, me.rank) = word;
  if (peer != me.rank) {  // its own only the host reads, once the call has ended
    ptx::fence_sys();
  }
  ptx::store_relaxed_sys(
      signal_of(me, peer, me.map.signals().word(epoch, static_cast<uint32_t>(me.rank))), epoch
  );
}

// Keeps, by one thread of a call's second launch, the refusal that the first launch has sent,
// though the host has cleared the fault since.
__device__ inline void recall_status(const RankView& me, uint32_t epoch, DeviceHandshake& own) {
  if (own.status == WordStatus::kGood &&
      word_of(me, me.rank, epoch, me.rank)->status == WordStatus::kRefused) {
    own.status = WordStatus::kRefused;
    raise_fault(me, {.kind = FaultKind::kRefused, .op = own.op, .epoch = epoch, .peer = me.rank});
  }
}

// Sends the handshake by threads [0, num_ranks) of one block, each to one peer.
__device__ inline void post_word_by_thread(
    const RankView& me, uint32_t epoch, const DeviceHandshake& word
) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    post_word(me, epoch, word, peer);
  }
}

// Reads a handshake as its sender wrote it, in one round trip to memory.
__device__ __forceinline__ DeviceHandshake read_word(const DeviceHandshake* from) {
  static_assert(sizeof(DeviceHandshake) % sizeof(uint4) == 0);
  constexpr int kVectors = sizeof(DeviceHandshake) / sizeof(uint4);
  union Bits {
    __device__ Bits() {}
    uint4 vectors[kVectors];
    DeviceHandshake word;
  } bits;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    bits.vectors[i] = ptx::load_16(reinterpret_cast<const uint4*>(from) + i);
  }
  return bits.word;
}

// Returns whether the call can go on after a peer's handshake; raises the fault if not.
__device__ __forceinline__ bool check_word(
    const RankView& me,
    uint32_t epoch,
    const DeviceHandshake& own,
    int peer,
    const DeviceHandshake& word
) {
  FaultRecord fault = {.op = own.op, .epoch = epoch, .peer = peer, .what = -1};
  if (word.stamp != me.stamp) {
    fault.kind = FaultKind::kStranger;
    fault.seen = static_cast<int64_t>(word.stamp);
    fault.wanted = static_cast<int64_t>(me.stamp);
  } else if (word.status == WordStatus::kRefused) {
    fault.kind = FaultKind::kRefused;
  } else if (word.op != own.op) {
    fault.kind = FaultKind::kMismatch;
    fault.seen = static_cast<int64_t>(word.op);
    fault.wanted = static_cast<int64_t>(own.op);
  } else {
#pragma unroll
    for (int field = 0; field < kSignatureWords; ++field) {
      if (word.signature.words[field] != own.signature.words[field] &&
          fault.kind == FaultKind::kNone) {
        fault.kind = FaultKind::kMismatch;
        fault.what = field;
        fault.seen = word.signature.words[field];
        fault.wanted = own.signature.words[field];
      }
    }
  }
  if (fault.kind != FaultKind::kNone) {
    raise_fault(me, fault);
    return false;
  }
  return true;
}

// Waits, by one thread per peer, [0, num_ranks), for the peer's handshake of this call and compares
// it with this rank's, for which it does not wait. A lost rank's reads as this rank's, but without
// tokens. Returns false if the call is given up.
__device__ inline bool accept_word(
    const RankView& me, uint32_t epoch, const DeviceHandshake& own, int peer, DeviceHandshake& word
) {
  if (peer == me.rank) {
    word = own;
    return own.status == WordStatus::kGood;
  }
  const WaitSite site = {own.op, epoch, peer, WaitFor::kWord};
  const auto slot = me.map.signals().word(epoch, static_cast<uint32_t>(peer));
  if (!wait_reached(me, signal_of(me, me.rank, slot), epoch, site)) {
    return false;
  }
  word = read_word(word_of(me, me.rank, epoch, peer));
  if (is_lost(me, peer)) {
    word = own;
    word.num_tokens = 0;
    return own.status == WordStatus::kGood;
  }
  return check_word(me, epoch, own, peer, word);
}

}  // namespace weft
