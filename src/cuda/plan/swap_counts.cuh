// SPDX-License-Identifier: Apache-2.0
// Second part of the plan kernel: sums all blocks' counts to this rank's, sends these to every rank
// behind the handshake, and takes in all ranks' counts. swap_counts() does both parts. Before:
// read_routing.cuh; after: group.cuh, or balance/swap.cu.
#pragma once

#include "cuda/device/wait.cuh"
#include "cuda/plan/read_routing.cuh"
#include "cuda/plan/shared.cuh"

namespace weft {

// Return the offset of a source's handshake and counts on every rank, and the signal behind them.
__device__ __forceinline__ uint64_t
word_offset(const PlanLaunch& call, uint32_t epoch, uint32_t source) {
  const DeviceControlMap& map = call.me.map;
  return call.is_second ? map.second_word_offset(epoch, source) : map.word_offset(epoch, source);
}
__device__ __forceinline__ uint32_t
word_signal(const PlanLaunch& call, uint32_t epoch, uint32_t source) {
  const SignalSlots signals = call.me.map.signals();
  return call.is_second ? signals.second_word(epoch, source) : signals.word(epoch, source);
}

// Writes, by one thread, this rank's handshake, except for its status.
__device__ inline void write_word(const PlanLaunch& call, DeviceHandshake& word) {
  word = DeviceHandshake();
  word.op = Op::kPlan;
  word.num_tokens = call.num_tokens;
  word.rows = call.plan_address;
  word.number = call.row_budget;
  word.stamp = call.me.stamp;
  word.signature = call.signature;
}

// Waits, by all threads of all blocks, until every block of this rank has come here. Returns false
// if the call is given up.
__device__ inline bool meet_blocks(const PlanLaunch& call, const PlanPlace& place) {
  bool is_met = true;
  __syncthreads();
  if (threadIdx.x == 0) {
    LocalState* local = call.me.local;
    if (ptx::add_acq_rel_gpu(&local->grid, 1) != place.num_blocks - 1) {
      const WaitSite site = {Op::kPlan, place.epoch, call.me.rank, WaitFor::kGrid};
      is_met = wait_reached(call.me, &local->grid, place.num_blocks, site);
    }
  }
  return __syncthreads_and(static_cast<int>(is_met)) != 0;
}

// Turns, by all threads, each warp's counts into the sums of the block's warps before it; own() and
// `before` get the sums of the rank and of its earlier blocks. Returns false if the call is given
// up.
__device__ inline bool sum_blocks(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  __syncthreads();
  int32_t* own = shared.own();
  for (uint32_t column = threadIdx.x; column < place.columns; column += blockDim.x) {
    uint32_t sum = 0;
    uint32_t* count = shared.counts + column;
#pragma unroll 4
    for (uint32_t warp = 0; warp < place.num_warps; ++warp, count += place.columns) {
      const uint32_t here = *count;
      *count = sum;
      sum += here;
    }
    if (place.num_blocks == 1) {
      own[column] = static_cast<int32_t>(sum);
      shared.before[column] = 0;
    } else {
      __stcg(call.scratch + blockIdx.x * place.columns + column, static_cast<int32_t>(sum));
    }
  }
  if (place.num_blocks == 1) {
    __syncthreads();
    return true;
  }
  if (!meet_blocks(call, place)) {
    return false;
  }
  for (uint32_t column = threadIdx.x; column < place.columns; column += blockDim.x) {
    int32_t sum = 0;
    int32_t before = 0;
    const int32_t* count = call.scratch + column;
#pragma unroll 16
    for (uint32_t block = 0; block < place.num_blocks; ++block, count += place.columns) {
      const int32_t there = __ldcg(count);
      before += block < blockIdx.x ? there : 0;
      sum += there;
    }
    own[column] = sum;
    shared.before[column] = static_cast<uint32_t>(before);
  }
  __syncthreads();
  return true;
}

// Sends, by all threads, handshake and counts to this block's share of the peers. Behind a refusal
// the counts mean nothing.
__device__ inline void post_message(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  const auto me = static_cast<uint32_t>(call.me.rank);
  const uint64_t offset = word_offset(call, place.epoch, me);
  const uint32_t num_vectors =
      (sizeof(DeviceHandshake) + place.columns * sizeof(int32_t) + sizeof(uint4) - 1) /
      sizeof(uint4);
  const auto* from = reinterpret_cast<const uint4*>(shared.message);
  if (shared.message->status == WordStatus::kSilent) {
    return;
  }
  for (uint32_t peer = blockIdx.x; peer < place.num_ranks; peer += place.num_blocks) {
    if (place.is_lost(peer)) {
      continue;
    }
    auto* to = reinterpret_cast<uint4*>(shared.control[peer] + offset);
    for (uint32_t i = threadIdx.x; i < num_vectors; i += blockDim.x) {
      to[i] = from[i];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x < place.num_ranks) {
    if (place.num_ranks > 1) {  // its own only the host reads, once the call has ended
      ptx::fence_sys();
    }
    const uint32_t slot = word_signal(call, place.epoch, me);
    for (uint32_t peer = blockIdx.x; peer < place.num_ranks; peer += place.num_blocks) {
      if (!place.is_lost(peer)) {
        ptx::store_relaxed_sys(
            reinterpret_cast<uint32_t*>(shared.control[peer]) + slot, place.epoch
        );
      }
    }
  }
}

// Waits, by all threads, for all peers' handshakes and reads them with the counts; this rank's own
// are in shared memory. A rank that is lost has no tokens. Returns false if the call is given up.
__device__ inline bool accept_words(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  const RankView& me = call.me;
  const uint32_t thread = threadIdx.x;
  const auto own = static_cast<uint32_t>(me.rank);
  const std::byte* control = shared.control[me.rank];
  bool is_good = true;
  if (thread < place.num_ranks && thread != own) {
    const WaitSite site = {Op::kPlan, place.epoch, static_cast<int>(thread), WaitFor::kWord};
    const uint32_t slot = word_signal(call, place.epoch, thread);
    is_good =
        wait_reached(me, reinterpret_cast<const uint32_t*>(control) + slot, place.epoch, site);
  }
  if (__syncthreads_and(static_cast<int>(is_good)) == 0) {
    return false;
  }

  const std::byte* first_word = control + word_offset(call, place.epoch, 0);
  const uint64_t stride = call.is_second ? me.map.second_word_stride() : me.map.word_stride;
  const auto* first_counts = reinterpret_cast<const int32_t*>(first_word + sizeof(DeviceHandshake));
  const uint64_t count_stride = stride / sizeof(int32_t);
  constexpr uint32_t kWordVectors = sizeof(DeviceHandshake) / sizeof(uint4);
  for (uint32_t i = thread; i < place.num_ranks * kWordVectors; i += blockDim.x) {
    const uint32_t rank = i / kWordVectors;
    const auto* from = reinterpret_cast<const uint4*>(first_word + rank * stride);
    const auto* here = reinterpret_cast<const uint4*>(shared.message);
    reinterpret_cast<uint4*>(shared.words)[i] = rank == own || place.is_lost(rank)
                                                    ? here[i % kWordVectors]
                                                    : __ldcg(from + i % kWordVectors);
  }
  if (thread < place.num_ranks) {
    const int32_t* count = first_counts + thread * count_stride + own;
    const int32_t there = place.is_lost(thread) ? 0 : __ldcg(count);
    shared.received[thread] = thread == own ? shared.own()[own] : there;
  }
  for (uint32_t column = thread; column < place.columns; column += blockDim.x) {
    int64_t total = 0;
    int64_t earlier = 0;
    const int32_t* count = first_counts + column;
#pragma unroll 8
    for (uint32_t rank = 0; rank < place.num_ranks; ++rank, count += count_stride) {
      const int32_t of_peer = place.is_lost(rank) ? 0 : __ldcg(count);
      const int32_t there = rank == own ? shared.own()[column] : of_peer;
      earlier += rank < own ? there : 0;
      total += there;
    }
    shared.total[column] = total;
    shared.earlier[column] = earlier;
  }
  __syncthreads();

  if (thread < place.num_ranks) {
    DeviceHandshake& word = shared.words[thread];
    shared.blocks[thread] = nullptr;
    if (place.is_lost(thread)) {
      word.num_tokens = 0;
    } else if (check_word(me, place.epoch, *shared.message, static_cast<int>(thread), word)) {
      const WaitSite site = {Op::kPlan, place.epoch, static_cast<int>(thread), WaitFor::kRecords};
      shared.blocks[thread] = peer_data(me, word.rows, site);
    }
    is_good = shared.blocks[thread] != nullptr || place.is_lost(thread);
  }
  return __syncthreads_and(static_cast<int>(is_good)) != 0;
}

// Counts this rank's routing and learns all ranks' counts, by all threads of all blocks. If the
// call is given up, all threads of a block return false together.
__device__ inline bool swap_counts(
    const PlanLaunch& call, const PlanPlace& place, const PlanShared& shared
) {
  for (uint32_t i = threadIdx.x; i < place.num_warps * place.columns; i += blockDim.x) {
    shared.counts[i] = 0;
  }
  if (threadIdx.x < place.num_ranks) {
    shared.control[threadIdx.x] = control_of(call.me, static_cast<int>(threadIdx.x));
  }
  if (threadIdx.x == blockDim.x - 1) {
    write_word(call, *shared.message);  // the counts follow it once they are summed
  }
  __syncthreads();
  count_tokens(call, place, shared);

  // A fault of this rank's own routing is known to all its blocks once they have met.
  const bool is_met = sum_blocks(call, place, shared);
  const bool is_first = threadIdx.x == 0;
  const bool is_refused =
      __syncthreads_or(static_cast<int>(!is_met || (is_first && is_stopped(call.me)))) != 0;
  if (is_first && is_refused) {
    const WordStatus status = own_status(call.me, place.epoch);
    shared.message->status = status == WordStatus::kGood ? WordStatus::kRefused : status;
  }
  __syncthreads();
  post_message(call, place, shared);
  const bool is_accepted = accept_words(call, place, shared);
  return !is_refused && is_accepted;
}

}  // namespace weft
