// SPDX-License-Identifier: Apache-2.0
// A plan and the dispatch by it in one launch, for calls of few tokens, where latency decides. The
// first blocks make the plan (plan/fused.cuh). Meanwhile the others push eager rows to places that
// need no plan (push.cuh) and then, with the plan, fan them out (eager.cuh). Or two launches: one
// for what goes out, which waits for no rank, and one for the rest. With replicas, pushing blocks
// wait until the planning blocks know where rows go, so that there is one launch only. Before:
// dispatch/call.cpp; after: the caller's experts.
#include <algorithm>
#include <type_traits>

#include "cuda/device/kernel.cuh"
#include "cuda/dispatch/eager.cuh"
#include "cuda/dispatch/push.cuh"
#include "cuda/plan/balance/fused.cuh"
#include "cuda/plan/fused.cuh"

namespace weft {
namespace {

static_assert(
    sizeof(SmallPlanShared) + sizeof(CallSetup) + sizeof(TeamProgress) + sizeof(SeenPlan) +
        sizeof(uint64_t) * kMoverWarps * kBulkStages <=
    kMostStaticShared
);
static_assert(kRoutedThreads >= kRoleThreads + 2 * kWarpLanes && kRoutedThreads <= kMaxPlanThreads);

// Two more warps of a block that moves rows, after the signalling one. Only one block uses
// kWordWarp, for the handshakes.
constexpr int kWatchWarp = kMoverWarps + 1;
constexpr int kWordWarp = kMoverWarps + 2;

// Sets, by all threads of a block, the addresses of eager rows, which no peer has to tell.
__device__ void set_places(CallSetup& setup, SeenPlan& seen, const RankView& me, uint32_t epoch) {
  if (threadIdx.x == 0) {
    seen.clear();
    setup.epoch = epoch;
  }
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    const DeviceControlMap& map = me.map;
    std::byte* control = control_of(me, peer);
    const int64_t first = static_cast<int64_t>(me.rank) * map.max_tokens;
    setup.rows[peer] = control + map.eager_rows_offset(epoch);
    setup.scales[peer] = control + map.eager_scales_offset(epoch);
    setup.weights[peer] = reinterpret_cast<float*>(
        control + map.eager_weights_offset(epoch, static_cast<uint32_t>(me.rank))
    );
    setup.signals[peer] = signal_of(me, peer, 0);
    setup.place[peer] = Place::kEager;
    setup.first_row[peer] = static_cast<int32_t>(first);
  }
  __syncthreads();
}

WEFT_HD PlanSharedMap shared_map(const PlanLaunch& call) {
  const PlanMap& map = call.plan.map;
  return {map.num_ranks, map.num_experts, map.max_tokens * static_cast<uint32_t>(call.topk)};
}

// Returns the experts of a call's plan.
__device__ __forceinline__ PlainExperts experts_of(const RoutedDispatchLaunch& call) {
  return {call.plan};
}
__device__ __forceinline__ BalancedExperts experts_of(const BalancedDispatchLaunch& call) {
  return {call, dynamic_shared + shared_map(call.plan).num_bytes()};
}

template <class Launch>
__device__ __forceinline__ void run_plan(
    const Launch& call, uint64_t number, SmallPlanShared& small
) {
  if (threadIdx.x == 0) {
    small.call = number;
  }
  const PlanShared shared = carve(shared_map(call.plan), dynamic_shared, small);
  make_routed_plan(call.plan, static_cast<uint32_t>(number), shared, experts_of(call), [&] {
    if (warp_in_block() == 0) {
      tell_counts(call.dispatch);
    }
  });
}

// Posts and accepts the plan's handshakes, by one warp of the grid.
template <CallPart kPart>
__device__ __forceinline__ void swap_plan_words(
    const PlanLaunch& call, uint32_t epoch, DeviceHandshake& word
) {
  if constexpr (kPart == CallPart::kReceive) {
    recall_plan_word(call, epoch, word);
  } else {
    post_plan_words(call, epoch, word);
  }
  if constexpr (kPart != CallPart::kSend) {
    accept_plan_words(call, epoch, word);
  }
}

// A launch that only sends leaves the number of the running call as it is, and whatever else
// LocalState counts in a call.
template <class Mover, CallPart kPart, class Launch>
__global__ void __launch_bounds__(kRoutedThreads, 1)
    dispatch_routed_rows(const __grid_constant__ Launch call) {
  if constexpr (Mover::kIsCompiled) {
    constexpr bool kIsBalanced = std::is_same_v<Launch, BalancedDispatchLaunch>;
    static_assert(!kIsBalanced || kPart == CallPart::kAll);
    using Push = DispatchPush<std::conditional_t<kIsBalanced, BalancedRoutes, EagerRoutes>>;
    __shared__ SmallPlanShared small;
    __shared__ CallSetup setup;
    __shared__ TeamProgress progress;
    __shared__ SeenPlan seen;
    __shared__ uint64_t full[kMoverWarps * Mover::kBarriers];
    constexpr bool kSends = kPart != CallPart::kReceive;
    constexpr bool kReceives = kPart != CallPart::kSend;
    const DispatchLaunch& rows = call.dispatch;
    const uint64_t number = current_call(rows.me);
    const auto epoch = static_cast<uint32_t>(number);
    const bool may_write = kSends && may_write_ahead(rows.me, epoch);
    const int block = static_cast<int>(blockIdx.x) - call.plan.num_blocks;
    if (block < 0) {
      if (may_write) {
        send_routing(call.plan, epoch, experts_of(call).chosen().count);
      }
      if constexpr (kReceives) {
        run_plan(call, number, small);
      }
    } else {
      clear_progress(progress);
      set_places(setup, seen, rows.me, epoch);
      const RoleBlock place = {block, call.num_blocks - call.plan.num_blocks};
      Push push(rows, setup, progress, place);
      // All lanes of a warp.
      const auto may_push = [&] { return may_write && (!kIsBalanced || await_block(seen.sizes)); };
      const int warp = warp_in_block();
      if (warp == kMoverWarps) {
        if (may_push()) {
          push.run_signals();
        }
      } else if (warp == kWordWarp && block == 0) {
        swap_plan_words<kPart>(call.plan, epoch, setup.own());
      } else if (kReceives && warp == kWatchWarp) {
        watch_plan<kIsBalanced>(call.plan, setup, seen);
      } else if (warp < kMoverWarps) {
        Mover mover(rows.me, warp, full + warp * Mover::kBarriers);
        if (may_push()) {
          push.run(mover);
        }
        if constexpr (kReceives) {
          EagerFanOut(rows, setup, seen, place).run(mover);
        }
      }
    }
    Mover::finish();
    if constexpr (kReceives) {
      finish_call(rows.me, epoch);
    }
  }
}

// Places the rows of a call that has ended. They lie where peers pushed them until the next call.
template <class Mover>
__global__ void __launch_bounds__(kRoleThreads, 1)
    place_rows(const __grid_constant__ DispatchLaunch call) {
  if constexpr (Mover::kIsCompiled) {
    __shared__ CallSetup setup;
    __shared__ SeenPlan seen;
    __shared__ uint64_t full[kMoverWarps * Mover::kBarriers];
    if (threadIdx.x == 0) {
      setup.epoch = call.me.local->epoch;
      seen.sizes = seen.slots = seen.shape = SeenPlan::kHere;
    }
    if (threadIdx.x < static_cast<uint32_t>(call.me.num_ranks)) {
      setup.tokens[threadIdx.x] = call.plan.tokens_of()[threadIdx.x];
    }
    __syncthreads();
    const RoleBlock place = {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    if (const int warp = warp_in_block(); warp < kMoverWarps) {
      Mover mover(call.me, warp, full + warp * Mover::kBarriers);
      EagerFanOut(call, setup, seen, place).run(mover);
    }
    Mover::finish();
  }
}

template <class Mover>
Kernel<RoutedDispatchLaunch> kernel_of(const RoutedDispatchLaunch& call, CallPart part) {
  constexpr auto kThreads = static_cast<int>(kRoutedThreads);
  const auto of_plan = static_cast<int>(shared_map(call.plan).num_bytes());
  const int shared_bytes = std::max(Mover::kSharedBytes, of_plan);
  using Launch = RoutedDispatchLaunch;
  switch (part) {
    case CallPart::kSend:
      return {dispatch_routed_rows<Mover, CallPart::kSend, Launch>, kThreads, Mover::kSharedBytes};
    case CallPart::kReceive:
      return {dispatch_routed_rows<Mover, CallPart::kReceive, Launch>, kThreads, shared_bytes};
    default:
      return {dispatch_routed_rows<Mover, CallPart::kAll, Launch>, kThreads, shared_bytes};
  }
}

template <class Mover>
Kernel<BalancedDispatchLaunch> kernel_of(const BalancedDispatchLaunch& call) {
  const PlanMap& map = call.plan.plan.map;
  const uint32_t num_routes = shared_map(call.plan).num_routes;
  const auto of_plan = static_cast<int>(balanced_shared_bytes(map, num_routes));
  return {
      dispatch_routed_rows<Mover, CallPart::kAll, BalancedDispatchLaunch>,
      static_cast<int>(kRoutedThreads),
      std::max(Mover::kSharedBytes, of_plan)};
}

template <class Mover>
void prepare_parts() {
  using Launch = RoutedDispatchLaunch;
  prepare_for_any_shared(dispatch_routed_rows<Mover, CallPart::kAll, Launch>);
  prepare_for_any_shared(dispatch_routed_rows<Mover, CallPart::kSend, Launch>);
  prepare_for_any_shared(dispatch_routed_rows<Mover, CallPart::kReceive, Launch>);
  prepare_for_any_shared(dispatch_routed_rows<Mover, CallPart::kAll, BalancedDispatchLaunch>);
  prepare_for_any_shared(place_rows<Mover>);
}

template <class Mover>
Kernel<DispatchLaunch> placing() {
  return {place_rows<Mover>, kRoleThreads, Mover::kSharedBytes};
}

}  // namespace

uint64_t balanced_shared_bytes(const PlanMap& map, uint32_t num_routes) {
  const PlanSharedMap shared = {map.num_ranks, map.num_experts, num_routes};
  const uint32_t words = BalanceArrays().lay_out(physical_experts(map), nullptr);
  return shared.num_bytes() + sizeof(int32_t) * uint64_t{words};
}

void prepare_routed_dispatch() {
  prepare_parts<VectorMover>();
  prepare_parts<BulkMover>();
}

void launch_routed_dispatch(const RoutedDispatchLaunch& call, CallPart part, cudaStream_t stream) {
  const bool is_bulk = call.dispatch.mover == Mover::kBulk;
  launch(
      is_bulk ? kernel_of<BulkMover>(call, part) : kernel_of<VectorMover>(call, part),
      call.num_blocks,
      call,
      stream
  );
}

void launch_place_rows(const DispatchLaunch& call, int num_blocks, cudaStream_t stream) {
  const bool is_bulk = call.mover == Mover::kBulk;
  launch(is_bulk ? placing<BulkMover>() : placing<VectorMover>(), num_blocks, call, stream);
}

void launch_balanced_dispatch(const BalancedDispatchLaunch& call, cudaStream_t stream) {
  const bool is_bulk = call.dispatch.mover == Mover::kBulk;
  launch(
      is_bulk ? kernel_of<BulkMover>(call) : kernel_of<VectorMover>(call),
      call.num_blocks,
      call,
      stream
  );
}

}  // namespace weft
