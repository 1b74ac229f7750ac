// SPDX-License-Identifier: Apache-2.0
// Begins every kernel of dispatch and combine: sends this rank's handshake (DeviceHandshake) to all
// peers and awaits theirs, which bring the addresses to which this rank writes. It also waits until
// the plan's arrival records have come from every source.
//
// Before: the kernels of plan/. After: the roles in dispatch/push.cuh, dispatch/fan_out.cuh,
// combine/reduce.cuh and combine/sum.cuh.
#pragma once

#include "cuda/device/lanes.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/plan.hpp"

namespace weft {

// State of a call that the threads of a block share, in shared memory. Arrays are by rank and hold
// addresses as this rank reaches them.
struct CallSetup {
  uint32_t epoch;
  uint32_t failures;
  alignas(16) std::byte own_bytes[sizeof(DeviceHandshake)];  // shared memory takes no initialisers
  std::byte* rows[kMaxDomainRanks];                          // where that rank wants its rows
  std::byte* scales[kMaxDomainRanks];
  float* weights[kMaxDomainRanks];  // this rank's part of its weights area
  uint32_t* signals[kMaxDomainRanks];
  int32_t first_row[kMaxDomainRanks];      // of this rank's arrivals in that rank's staging
  int32_t received_base[kMaxDomainRanks];  // of that rank's arrivals in this rank's staging
  Place place[kMaxDomainRanks];
  int32_t tokens[kMaxDomainRanks];        // of that rank
  uint32_t copy_number[kMaxDomainRanks];  // of the copies from that rank, by copy engines only

  [[nodiscard]] __device__ __forceinline__ DeviceHandshake& own() {
    return *reinterpret_cast<DeviceHandshake*>(own_bytes);
  }
};

// Fills in this rank's handshake, by one thread of a block. `call`, the launch, has what the host
// knows; only the device knows the epoch, the plan's number and whether an earlier call has failed.
template <class Launch>
__device__ __forceinline__ void set_own_word(CallSetup& setup, const Launch& call) {
  const RankView& me = call.me;
  const DeviceHandshake word = word_of(call);
  const uint32_t epoch = current_epoch(me);
  const WordStatus status =
      own_status_at_begin(me, epoch);  // an earlier call may have left nothing
  const int32_t num_tokens = call.plan.header()->num_tokens;
  const uint64_t plan_epoch = call.plan.header()->epoch;
  const uint32_t plan_members = call.plan.header()->members;
  const uint32_t plan_serial = call.plan.header()->serial;
  const uint32_t members = me.local->members;
  setup.failures = 0;
  setup.own() = word;
  setup.own().stamp = me.stamp;
  setup.own().num_tokens = num_tokens;
  setup.own().signature.words[kPlanNumberWord] = static_cast<int64_t>(plan_epoch);
  setup.own().status = status;
  setup.epoch = epoch;
  if (plan_members != members) {  // all ranks find that by themselves
    setup.own().status = WordStatus::kRefused;
    raise_fault(
        me,
        {.kind = FaultKind::kOldPlan,
         .op = word.op,
         .epoch = epoch,
         .peer = me.rank,
         .seen = plan_members,
         .wanted = members}
    );
  } else if (plan_serial != call.plan.serial && status == WordStatus::kGood) {
    setup.own().status = WordStatus::kRefused;
    raise_fault(
        me,
        {.kind = FaultKind::kOtherPlan,
         .op = word.op,
         .epoch = epoch,
         .peer = me.rank,
         .seen = plan_serial,
         .wanted = call.plan.serial}
    );
  }
}

// Begins a call; all threads of every block call it. Returns false if the call is given up. With
// `is_eager` rows go among the peers' eager rows, at known addresses: this waits for no handshake,
// and some blocks call accept_peers() later. `part`: of a call in two launches.
template <class Launch>
__device__ inline bool begin_call(
    CallSetup& setup, const Launch& call, bool is_eager = false, CallPart part = CallPart::kAll
) {
  const RankView& me = call.me;
  const PlanView& plan = call.plan;
  const int peer = static_cast<int>(threadIdx.x);
  int32_t tokens = 0;
  int32_t first_row = 0;
  int32_t received_base = 0;
  uint64_t records_of_peer = 0;
  if (peer < me.num_ranks) {  // here since the plan's kernel has ended; all loads at once
    tokens = plan.tokens_of()[peer];
    first_row = plan.arrival_base()[peer];
    received_base = plan.received_base()[peer];
    records_of_peer = ptx::load_acquire_sys(records_of(me, me.rank, peer));  // mostly there, too
  }
  if (threadIdx.x == 0) {
    set_own_word(setup, call);
    if (part == CallPart::kReceive) {
      recall_status(me, setup.epoch, setup.own());
    }
  }
  __syncthreads();
  const uint32_t epoch = setup.epoch;
  if (blockIdx.x == 0 && part != CallPart::kReceive) {
    post_word_by_thread(me, epoch, setup.own());
  }
  if (peer < me.num_ranks) {
    const WaitSite site = {setup.own().op, epoch, peer, WaitFor::kRecords};
    const uint64_t* records = records_of(me, me.rank, peer);
    const auto plan_epoch = static_cast<uint64_t>(setup.own().signature.words[kPlanNumberWord]);
    DeviceHandshake said;
    bool is_good = false;
    const bool is_going_on =
        is_eager ? !is_stopped(me) : accept_word(me, epoch, setup.own(), peer, said);
    if (is_going_on &&
        (is_reached(records_of_peer, plan_epoch) || wait_reached(me, records, plan_epoch, site))) {
      std::byte* control = control_of(me, peer);
      const auto own = static_cast<uint32_t>(me.rank);
      if (is_eager) {
        setup.rows[peer] = control + me.map.eager_rows_offset(epoch);
        setup.scales[peer] = control + me.map.eager_scales_offset(epoch);
        setup.place[peer] = Place::kEager;
      } else {
        const WaitSite owner = {
            site.op, epoch, is_lost(me, peer) ? me.rank : peer, site.waiting_for};
        setup.rows[peer] =
            peer_data(me, said.rows, owner);  // of a lost rank this one's: no row goes there
        setup.scales[peer] = peer_data(me, said.scales, owner);
        setup.place[peer] = said.place;
      }
      setup.tokens[peer] = tokens;
      setup.first_row[peer] = first_row;
      setup.received_base[peer] = received_base;
      setup.weights[peer] = reinterpret_cast<float*>(
          control +
          (is_eager ? me.map.eager_weights_offset(epoch, own) : me.map.weights_offset(own))
      );
      setup.signals[peer] = signal_of(me, peer, 0);
      is_good = setup.rows[peer] != nullptr && setup.scales[peer] != nullptr;
    }
    if (!is_good) {
      atomicAdd(&setup.failures, 1U);
    }
  }
  __syncthreads();
  return setup.failures == 0;
}

// Waits for the handshakes, by all threads of a block whose begin_call() had `is_eager`, even if
// that failed. Returns false if the call is given up.
__device__ inline bool accept_peers(CallSetup& setup, const RankView& me) {
  const int peer = static_cast<int>(threadIdx.x);
  DeviceHandshake said;
  if (peer < me.num_ranks && !accept_word(me, setup.epoch, setup.own(), peer, said)) {
    atomicAdd(&setup.failures, 1U);
  }
  __syncthreads();
  return setup.failures == 0;
}

// The numbers of the arrivals that one chunk of a source's tokens makes on this rank, at most
// chunk_tokens() of them.
struct ChunkArrivals {
  int32_t begin;
  int32_t end;
};

__device__ __forceinline__ ChunkArrivals arrivals_of(const PlanView& plan, int source, int chunk) {
  const int32_t* begin = plan.chunk_begin(static_cast<uint32_t>(source)) + chunk;
  return {begin[0], begin[1]};
}

// Items are pairs (source, chunk), in the order in which sources raise their signals: chunk by
// chunk, and within a chunk the `num_sources` sources that follow this rank. This rank itself is
// the last source, or is left out.
struct ChunkItem {
  int source;
  int chunk;
};

__device__ __forceinline__ ChunkItem item_at(const RankView& me, int num_sources, int index) {
  const int chunk = index / num_sources;
  int source = me.rank + 1 + index % num_sources;
  source -= source >= me.num_ranks ? me.num_ranks : 0;
  return {source, chunk};
}

__device__ __forceinline__ int num_items(
    const RankView& me, const CallSetup& setup, int num_sources
) {
  int most = 0;
  for (int rank = 0; rank < me.num_ranks; ++rank) {
    most = max(most, num_device_chunks(setup.tokens[rank]));
  }
  return most * num_sources;
}

}  // namespace weft
