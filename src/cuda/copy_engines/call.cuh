// SPDX-License-Identifier: Apache-2.0
// How the two kernels of a call by copy engines begin, and how the first ends. The first packs a
// block for each peer and tells the peers of the call; copy engines copy the blocks (copies.cpp);
// the second takes what the peers' copy engines have brought. dispatch.cu and combine.cu of this
// folder have the kernels. All threads of every block call these functions.
#pragma once

#include <type_traits>

#include "cuda/device/call_setup.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {

// Sets the places within `block`, which goes to `rank` or has come from there.
__device__ __forceinline__ void set_places(
    CallSetup& setup, const CopiedRows& rows, int rank, std::byte* block, int32_t arrivals
) {
  setup.rows[rank] = block;
  setup.scales[rank] = block + rows.scales_offset(arrivals);
  setup.weights[rank] = reinterpret_cast<float*>(block + rows.weights_offset(arrivals));
  setup.first_row[rank] = 0;
  setup.place[rank] = Place::kCopied;
}

// Returns where this rank packs its block for a peer, before it is copied. Its block for itself
// lies at once where other ranks copy theirs to.
__device__ __forceinline__ std::byte* packed_for(
    const RankView& me, const CopiedLaunch& copied, int peer
) {
  if (peer == me.rank) {
    const auto own = static_cast<uint32_t>(me.rank);
    return control_of(me, me.rank) + me.map.copied_offset(copied.area, own);
  }
  const int step = peer - me.rank - 1 + (peer > me.rank ? 0 : me.num_ranks);
  return copied.packed + static_cast<uint64_t>(step) * me.map.copied_stride;
}

// True if sums come back from the experts (combine), false if rows go out to them (dispatch).
template <class Launch>
inline constexpr bool kIsBack = std::is_same_v<Launch, CombineLaunch>;

// Begins either kernel. Returns the thread's index, which stands for a peer.
template <class Launch>
__device__ __forceinline__ int begin_copied(CallSetup& setup, const Launch& call) {
  if (threadIdx.x == 0) {
    set_own_word(setup, call);
    setup.failures = is_stopped(call.me) ? 1 : 0;
  }
  __syncthreads();
  return static_cast<int>(threadIdx.x);
}

// Begins the first kernel. In combine it also waits for the records of the peers' tokens. Returns
// false if an earlier call has failed, or this one is given up.
template <class Launch>
__device__ inline bool begin_pack(CallSetup& setup, const Launch& call) {
  constexpr bool kBack = kIsBack<Launch>;
  const RankView& me = call.me;
  const PlanView& plan = call.plan;
  const int peer = begin_copied(setup, call);
  bool is_good = setup.failures == 0;
  __syncthreads();
  if (is_good && peer < me.num_ranks) {
    setup.tokens[peer] = kBack ? plan.tokens_of()[peer] : setup.own().num_tokens;
    const int32_t arrivals = kBack ? plan.received()[peer] : plan.sent()[peer];
    set_places(setup, call.copied.rows, peer, packed_for(me, call.copied, peer), arrivals);
    const WaitSite site = {setup.own().op, setup.epoch, peer, WaitFor::kRecords};
    const auto plan_epoch = static_cast<uint64_t>(setup.own().signature.words[kPlanNumberWord]);
    is_good = !kBack || wait_reached(me, records_of(me, me.rank, peer), plan_epoch, site);
  }
  return __syncthreads_and(is_good ? 1 : 0) != 0;
}

// Ends the packing kernel: its last block tells the peers of the call, or that this rank gives it
// up, as even unpacked blocks are copied; and in any case that copies begin.
__device__ inline void finish_pack(
    CallSetup& setup, const RankView& me, const CopiedLaunch& copied
) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acq_rel_gpu(&me.local->grid, 1) == gridDim.x - 1;
    setup.own().status = own_status(me, setup.epoch);
  }
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (is_last && peer < me.num_ranks && !is_lost(me, peer)) {
    post_word(me, setup.epoch, setup.own(), peer);
    const auto slot = me.map.signals().copying(static_cast<uint32_t>(me.rank));
    ptx::store_relaxed_sys(signal_of(me, peer, slot), copied.number);
  }
}

// Waits for a peer's handshake, which says where the peer copies its rows to, and for the rows.
// Returns false if the call is given up.
template <class Launch>
__device__ inline bool accept_copies(CallSetup& setup, const Launch& call, int peer) {
  const RankView& me = call.me;
  const auto slot = me.map.signals().copied(static_cast<uint32_t>(peer));
  const auto is_here = [&](const auto* signal, auto wanted, WaitFor what) {
    const WaitSite site = {setup.own().op, setup.epoch, peer, what};
    return wait_reached(me, signal, wanted, site);
  };
  DeviceHandshake said;
  if (!accept_word(me, setup.epoch, setup.own(), peer, said)) {
    return false;
  }
  const auto plan_epoch = static_cast<uint64_t>(said.signature.words[kPlanNumberWord]);
  const auto number = static_cast<uint32_t>(said.number);
  const uint32_t* copied = signal_of(me, me.rank, slot);
  if (!is_here(records_of(me, me.rank, peer), plan_epoch, WaitFor::kRecords) ||
      (peer != me.rank && !is_here(copied, number, WaitFor::kCopies))) {
    return false;
  }
  setup.copy_number[peer] = number;
  setup.tokens[peer] = call.plan.tokens_of()[peer];
  std::byte* block = control_of(me, me.rank) + said.rows.offset;
  const int32_t* arrivals = kIsBack<Launch> ? call.plan.sent() : call.plan.received();
  set_places(setup, call.copied.rows, peer, block, arrivals[peer]);
  return true;
}

// Begins the second kernel: waits for all handshakes, and for the copies of all peers. Returns
// false if the call is given up.
template <class Launch>
__device__ inline bool begin_receive(CallSetup& setup, const Launch& call) {
  const int peer = begin_copied(setup, call);
  if (peer < call.me.num_ranks && !accept_copies(setup, call, peer)) {
    atomicAdd(&setup.failures, 1U);
  }
  __syncthreads();
  return setup.failures == 0;
}

// Ends the second kernel. A peer that broke off did not wait for this rank, and its queue goes on:
// the copies of its next call but one go where those of this call lie.
__device__ inline void finish_receive(CallSetup& setup, const RankView& me) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks && peer != me.rank && setup.failures == 0) {
    ptx::fence_sys();
    const auto slot = me.map.signals().copying(static_cast<uint32_t>(peer));
    const uint32_t seen = ptx::load_acquire_sys(signal_of(me, me.rank, slot));
    if (is_reached(seen, setup.copy_number[peer] + 2)) {
      raise_fault(
          me, {.kind = FaultKind::kGone, .op = setup.own().op, .epoch = setup.epoch, .peer = peer}
      );
    }
  }
  finish_call(me, setup.epoch);
}

}  // namespace weft
