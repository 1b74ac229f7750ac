// SPDX-License-Identifier: Apache-2.0
// Brings an imported plan, which the host has made (hosts/plan_image.hpp), into the plan blocks of
// this domain: ranks exchange handshakes as in plan.cu, then each copies its own part into its
// block and the records of its arrivals straight into the receivers' blocks. Later calls cannot
// tell it from a plan made by plan.cu. Before: plan/call.cpp; after: the kernels of dispatch/ and
// combine/.
#include "cuda/device/kernel.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/plan/group.cuh"

namespace weft {
namespace {

constexpr int kImportThreads = 512;  // of a block; a guess
static_assert(kImportThreads >= kMaxDomainRanks);

// State of the call that the threads of a block share, in shared memory.
struct ImportedSetup {
  uint64_t call;  // its number in full
  uint32_t epoch;
  uint32_t failures;
  alignas(16) std::byte own_bytes[sizeof(DeviceHandshake)];  // shared memory takes no initialisers
  std::byte* blocks[kMaxDomainRanks];                        // plan blocks as mapped here

  [[nodiscard]] __device__ DeviceHandshake& own() {
    return *reinterpret_cast<DeviceHandshake*>(own_bytes);
  }
};

// Returns the arrivals of `source` at each rank, behind its handshake in this rank's control
// region.
__device__ const int32_t* counts_of(const RankView& me, uint32_t epoch, int source) {
  return reinterpret_cast<const int32_t*>(word_of(me, me.rank, epoch, source) + 1);
}

// Sends this rank's counts and handshake: threads [0, num_ranks) of one block, each to one rank.
__device__ void post_counts(
    const ImportedPlanLaunch& call, uint32_t epoch, const DeviceHandshake& word
) {
  const RankView& me = call.me;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    auto* counts = reinterpret_cast<int32_t*>(word_of(me, peer, epoch, me.rank) + 1);
    for (int rank = 0; rank < me.num_ranks; ++rank) {
      counts[rank] = call.to[rank].num_arrivals;
    }
  }
  post_word_by_thread(me, epoch, word);
}

// Exchanges the handshakes, by all threads of every block. Returns false if the call is given up.
__device__ bool meet_ranks(ImportedSetup& setup, const ImportedPlanLaunch& call) {
  const RankView& me = call.me;
  if (threadIdx.x == 0) {
    setup.call = current_call(me);
    setup.epoch = static_cast<uint32_t>(setup.call);
    setup.failures = 0;
    DeviceHandshake word;
    word.op = Op::kPlan;
    word.status = own_status(me, setup.epoch);
    word.num_tokens = call.num_tokens;
    word.rows = call.plan_address;
    word.stamp = me.stamp;
    word.signature = call.signature;
    setup.own() = word;
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    post_counts(call, setup.epoch, setup.own());
  }
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    const WaitSite site = {Op::kPlan, setup.epoch, peer, WaitFor::kRecords};
    DeviceHandshake said;
    setup.blocks[peer] = nullptr;
    if (accept_word(me, setup.epoch, setup.own(), peer, said)) {
      setup.blocks[peer] = peer_data(me, said.rows, site);
      if (blockIdx.x == 0) {
        call.plan.tokens_of()[peer] = said.num_tokens;
      }
    }
    if (setup.blocks[peer] == nullptr) {
      atomicAdd(&setup.failures, 1U);
    }
  }
  __syncthreads();
  return setup.failures == 0;
}

// All threads of all blocks copy an array. `bytes` are rounded up to vectors: every array has room
// for that.
__device__ void copy_array(std::byte* to, const std::byte* from, uint64_t bytes) {
  const uint64_t count = (bytes + sizeof(uint4) - 1) / sizeof(uint4);
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
}

__device__ void copy_own(const ImportedPlanLaunch& call) {
  const PlanMap& map = call.plan.map;
  const auto copy = [&](uint64_t offset, uint64_t bytes) {
    copy_array(call.plan.data + offset, call.image + offset, bytes);
  };
  const auto tokens = static_cast<uint64_t>(call.num_tokens);
  copy(map.rows_per_expert, map.global_routes - map.rows_per_expert);
  copy(map.route_expert, sizeof(int32_t) * tokens * map.max_topk);
  copy(map.route_slot, sizeof(int32_t) * tokens * map.max_topk);
  copy(map.route_weight, sizeof(float) * tokens * map.max_topk);
  copy(map.primary, sizeof(int32_t) * tokens * map.num_ranks);
  copy(map.arrival, sizeof(int32_t) * tokens * map.num_ranks);
}

__device__ void copy_records(const ImportedPlanLaunch& call, const ImportedSetup& setup, int rank) {
  const PlanMap& map = call.plan.map;
  const auto me = static_cast<uint32_t>(call.me.rank);
  const ImportedRecords& records = call.to[rank];
  const auto arrivals = static_cast<uint64_t>(records.num_arrivals);
  const uint64_t routes = arrivals * map.max_topk;
  const auto copy = [&](uint64_t to, uint64_t from, uint64_t bytes) {
    copy_array(setup.blocks[rank] + to, call.image + from, bytes);
  };
  const auto chunks = static_cast<uint64_t>(num_device_chunks(call.num_tokens));
  copy(map.chunk_begin(me), records.chunk_begin, sizeof(int32_t) * (chunks + 1));
  copy(map.heads(me), records.heads, sizeof(ArrivalHead) * arrivals);
  copy(map.slots(me), records.slots, sizeof(int32_t) * routes);
  copy(map.weights(me), records.weights, sizeof(float) * routes);
  copy(map.origins(me), records.origins, sizeof(int32_t) * routes);
}

// Writes, by one block, what follows from all ranks' counts.
__device__ void write_counts(const ImportedPlanLaunch& call, const ImportedSetup& setup) {
  const RankView& me = call.me;
  const uint32_t epoch = setup.epoch;
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < me.num_ranks) {
    int32_t arrivals_before = 0;  // at `rank`, of ranks before this one
    int32_t received_before = 0;  // here, of ranks before `rank`
    for (int source = 0; source < me.num_ranks; ++source) {
      const int32_t* counts = counts_of(me, epoch, source);
      arrivals_before += source < me.rank ? __ldcg(counts + rank) : 0;
      received_before += source < rank ? __ldcg(counts + me.rank) : 0;
    }
    call.plan.sent()[rank] = __ldcg(counts_of(me, epoch, me.rank) + rank);
    call.plan.received()[rank] = __ldcg(counts_of(me, epoch, rank) + me.rank);
    call.plan.arrival_base()[rank] = arrivals_before;
    call.plan.received_base()[rank] = received_before;
  }
  if (threadIdx.x == 0) {
    PlanHeader header = *reinterpret_cast<const PlanHeader*>(call.image);
    header.epoch = setup.call;
    header.serial = call.plan.serial;
    *call.plan.header() = header;
  }
}

// Called by all threads. The last block that has copied tells all receivers.
__device__ void raise_records(const ImportedPlanLaunch& call, const ImportedSetup& setup) {
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  ptx::fence_sys();
  if (ptx::add_acq_rel_gpu(&call.me.local->grid, 1) != gridDim.x - 1) {
    return;
  }
  ptx::fence_sys();
  tell_records(call.me, setup.call);
}

__global__ void __launch_bounds__(kImportThreads)
    import_plan_kernel(const __grid_constant__ ImportedPlanLaunch call) {
  __shared__ ImportedSetup setup;
  if (meet_ranks(setup, call)) {
    if (blockIdx.x == 0) {
      write_counts(call, setup);
    }
    copy_own(call);
    for (int rank = 0; rank < call.me.num_ranks; ++rank) {
      copy_records(call, setup, rank);
    }
    raise_records(call, setup);
  } else if (blockIdx.x == 0) {
    clear_plan(call.plan);
  }
  finish_call(call.me, setup.epoch);
}

}  // namespace

void prepare_imported_plan() {
  load(import_plan_kernel);
}

void launch_imported_plan(const ImportedPlanLaunch& call, cudaStream_t stream) {
  const Kernel<ImportedPlanLaunch> kernel = {import_plan_kernel, kImportThreads};
  launch(kernel, call.num_blocks, call, stream, {call.me.rank, call.me.num_ranks, "cuda"});
}

}  // namespace weft
