// SPDX-License-Identifier: Apache-2.0
// The gate behind a call (GateState in layout/control.hpp), and what becomes of plans when ranks
// are lost. Before: the kernels of the call; after: what the caller has queued behind it, or
// repeats.cpp, which makes the call again.
#include "cuda/device/kernel.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

constexpr int kForgetThreads = 256;
constexpr uint64_t kMostHeld = 20;  // deadlines of a wait, should the host never answer; a guess

// One warp tells the peers that this rank has all of its calls up to `last`, and waits until they
// say the same. Returns false if it is stopped.
__device__ bool meet_peers(const RankView& me, uint64_t last, bool waits) {
  const int peer = lane_index();
  const auto epoch = static_cast<uint32_t>(last);
  const bool is_peer = peer < me.num_ranks && peer != me.rank && !is_lost(me, peer);
  const SignalSlots slots = me.map.signals();
  if (is_peer) {
    ptx::store_relaxed_sys(signal_of(me, peer, slots.whole(static_cast<uint32_t>(me.rank))), epoch);
  }
  if (peer == 0) {
    me.local->gate.whole = last;
  }
  bool is_met = true;
  if (is_peer && waits) {
    const WaitSite site = {Op::kNone, epoch, peer, WaitFor::kWhole};
    const auto slot = slots.whole(static_cast<uint32_t>(peer));
    is_met = wait_reached(me, signal_of(me, me.rank, slot), epoch, site);
  }
  return __all_sync(kAllLanes, is_met);
}

// One thread holds back the work behind the gate until the call has been made again.
__device__ void hold(const GateLaunch& call) {
  const RankView& me = call.me;
  auto* gate = static_cast<volatile GateState*>(&me.local->gate);
  auto* held = static_cast<volatile uint64_t*>(call.done + 1);
  gate->number = call.number;
  ptx::fence_sys();
  gate->is_held = 1;
  *held = call.number;
  Patience patience(ptx::clock_now());
  while (gate->is_held != 0 && gate->is_off == 0) {
    __nanosleep(1000);
    if (patience.look(ptx::clock_now(), me.look_ns) > kMostHeld * me.timeout_ns) {
      break;
    }
  }
  *held = 0;
  gate->is_held = 0;
}

__global__ void __launch_bounds__(kWarpLanes) pass_gate(const __grid_constant__ GateLaunch call) {
  const RankView& me = call.me;
  auto* gate = static_cast<volatile GateState*>(&me.local->gate);
  const uint64_t last = current_call(me) - 1;
  const StopState state = stop_state(me);
  __syncwarp();
  // All ranks have given up a call that one of them has refused; none waits for another's.
  const bool is_passed =
      state != StopState::kBroken && meet_peers(me, last, state == StopState::kRunning);
  if (lane_index() != 0) {
    return;
  }
  if (is_passed) {
    gate->passed = last;
    if (call.is_repeated) {
      ptx::fence_sys();
      gate->is_held = 0;
    }
  } else if (!call.is_repeated && gate->is_off == 0) {
    hold(call);
  }
  if (!call.is_repeated) {
    ptx::fence_sys();
    *static_cast<volatile uint64_t*>(call.done) = call.number;
  }
}

struct ForgetLaunch {
  RankView me;
  PlanView plan;
};

__global__ void __launch_bounds__(kForgetThreads)
    forget_lost(const __grid_constant__ ForgetLaunch call) {
  const RankView& me = call.me;
  const PlanView& plan = call.plan;
  const auto thread = static_cast<int>(threadIdx.x);
  if (plan.header()->serial != plan.serial) {
    return;  // it is yet to be made
  }
  const int num_tokens = plan.header()->num_tokens;
  const auto local_experts = static_cast<int>(plan.map.experts_per_rank.divisor());
  for (int i = thread; i < num_tokens * static_cast<int>(plan.map.max_topk); i += kForgetThreads) {
    const int32_t expert = plan.route_expert()[i];
    const bool is_expert = expert >= 0 && expert < static_cast<int32_t>(plan.map.num_experts);
    if (is_expert && is_lost(me, expert / local_experts)) {
      plan.route_slot()[i] = -1;
    }
  }
  for (int i = thread; i < num_tokens * me.num_ranks; i += kForgetThreads) {
    if (is_lost(me, i % me.num_ranks)) {
      plan.primary()[i] = -1;
    }
  }
  if (thread < me.num_ranks && is_lost(me, thread)) {
    plan.tokens_of()[thread] = 0;
  }
  if (thread == 0) {
    plan.header()->members = me.local->members;
  }
}

}  // namespace

void prepare_gate() {
  load(pass_gate);
  load(forget_lost);
}

void launch_gate(const GateLaunch& call, cudaStream_t stream) {
  launch(Kernel<GateLaunch>{pass_gate, kWarpLanes}, 1, call, stream);
}

void launch_forget_lost(const RankView& me, const PlanView& plan, cudaStream_t stream) {
  launch(Kernel<ForgetLaunch>{forget_lost, kForgetThreads}, 1, ForgetLaunch{me, plan}, stream);
}

}  // namespace weft
