// SPDX-License-Identifier: Apache-2.0
// combine on a GPU in two launches, for calls of few tokens that are scaled by weights of the
// tokens' ranks. The first sends the experts' rows as they are, one for each route, to a place on
// the token's rank known in advance, and ends; it may wait for rows that are still being written
// (RowMarks), but for no other rank. The second waits for the ranks and adds a token's rows with
// their weights, in the order and with the roundings of the one launch (reduce.cuh, sum.cuh).
// Before: combine/call.cpp; after: the caller.
#include "cuda/combine/choice.cuh"
#include "cuda/combine/row_sum.cuh"
#include "cuda/device/call_setup.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

using RouteKernel = Kernel<CombineLaunch>;

constexpr int kThreads = 512;  // a guess

// Waits, by one thread, until a block of rows of a local expert is whole. Returns false if the call
// is given up, by the deadline or elsewhere.
__device__ bool await_mark(const CombineLaunch& call, uint32_t epoch, int expert, int block) {
  const RankView& me = call.me;
  const auto experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  const auto blocks = static_cast<int>(call.ready.marks.cols) / experts;
  const auto* mark =
      reinterpret_cast<const uint32_t*>(call.ready.marks.data) + int64_t{expert} * blocks + block;
  Patience patience(ptx::clock_now());
  for (;;) {
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      seen = ptx::load_acquire_sys(mark);
      if (seen == call.ready.wanted) {
        return true;
      }
      __nanosleep(me.poll_ns);
    }
    if (is_stopped(me)) {
      return false;
    }
    if (patience.look(ptx::clock_now(), me.look_ns) > me.timeout_ns) {
      const FaultRecord fault = {
          .kind = FaultKind::kTimeout,
          .op = Op::kCombine,
          .epoch = epoch,
          .peer = me.rank,
          .waiting_for = WaitFor::kMark,
          .what = me.rank * experts + expert,
          .block = block,
          .seen = static_cast<int64_t>(seen),
          .wanted = static_cast<int64_t>(call.ready.wanted)};
      raise_fault(me, fault);
      return false;
    }
  }
}

// Returns, to all threads of a block, whether row `slot` can be read.
__device__ bool is_row_ready(const CombineLaunch& call, uint32_t epoch, int32_t slot) {
  if (call.ready.marks.data == nullptr) {
    return true;
  }
  bool is_ready = true;
  if (threadIdx.x == 0) {
    const auto stride = static_cast<int32_t>(call.plan.header()->expert_stride);
    const int32_t in_expert = slot % stride;
    const auto rows = static_cast<int32_t>(call.ready.block_rows);
    is_ready = await_mark(call, epoch, slot / stride, rows == 0 ? 0 : in_expert / rows);
  }
  return __syncthreads_and(static_cast<int>(is_ready)) != 0;
}

// All threads of a block copy a row.
__device__ void copy_row(std::byte* to, const std::byte* from, int64_t row_bytes) {
#pragma unroll 4
  for (int64_t at = threadIdx.x * 16; at < row_bytes; at += kThreads * 16) {
    ptx::store_16(to + at, ptx::load_16(from + at));
  }
}

// Sends, by all threads of a block, the rows of a chunk of a rank's tokens to that rank, and
// signals it. Returns false if the call is given up.
__device__ bool send_chunk(
    const CombineLaunch& call, const CallSetup& setup, const ChunkItem& item
) {
  const auto source = static_cast<uint32_t>(item.source);
  const int64_t max_topk = call.plan.map.max_topk;
  const int64_t row_bytes = call.payload.row_bytes;
  const ChunkArrivals arrivals = arrivals_of(call.plan, item.source, item.chunk);
  for (int64_t arrival = arrivals.begin; arrival < arrivals.end; ++arrival) {
    const ArrivalHead head = call.plan.heads(source)[arrival];
    for (int i = 0; i < head.num_routes; ++i) {
      const int32_t slot = call.plan.slots(source)[arrival * max_topk + i];
      const int32_t k = call.plan.origins(source)[arrival * max_topk + i] & 0xff;
      if (!is_row_ready(call, setup.epoch, slot)) {
        return false;
      }
      std::byte* to = setup.rows[item.source] + (head.token * max_topk + k) * row_bytes;
      copy_row(to, call.rows + slot * row_bytes, row_bytes);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_sys();
    const auto slot = call.me.map.signals().combine(call.me.rank, item.chunk);
    ptx::store_relaxed_sys(setup.signals[item.source] + slot, setup.epoch);
  }
  return true;
}

// Leaves the number of the running call, and all else that LocalState counts, as it is.
__global__ void __launch_bounds__(kThreads)
    send_rows_by_route(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  if (!begin_call(setup, call, true, CallPart::kSend)) {
    return;
  }
  const int items = num_items(call.me, setup, call.me.num_ranks);
  for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
    const ChunkItem item = item_at(call.me, call.me.num_ranks, i);
    const bool is_there = item.chunk < num_device_chunks(setup.tokens[item.source]);
    if (is_there && !send_chunk(call, setup, item)) {
      return;
    }
  }
}

// The kept routes of a token in the order in which they are added: by rank, then slot.
struct OrderedRoutes {
  int32_t count;
  int32_t rank[kWarpLanes];
  int32_t k[kWarpLanes];
  float scale[kWarpLanes];
};

// Fills in a token's routes, by one warp.
__device__ void order_routes(const CombineLaunch& call, int token, OrderedRoutes& routes) {
  constexpr auto kNone = ~uint64_t{0};
  const int lane = lane_index();
  const int64_t route = static_cast<int64_t>(token) * call.plan.map.max_topk + lane;
  const auto experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  const int32_t slot = lane < call.topk ? call.plan.route_slot()[route] : -1;
  const int32_t rank = slot >= 0 ? call.plan.route_expert()[route] / experts : 0;
  const uint64_t key =
      slot >= 0 ? static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(slot) : kNone;
  float scale = given_weight(call, call.source_weights, token);
  if (lane < call.topk) {
    scale = counted_weight(call, token, lane, scale);
  }
  int place = 0;
  for (int other = 0; other < call.topk; ++other) {
    place += __shfl_sync(kAllLanes, key, other) < key ? 1 : 0;
  }
  const uint32_t kept = __ballot_sync(kAllLanes, slot >= 0);
  if (lane == 0) {
    routes.count = __popc(kept);
  }
  if (slot >= 0) {
    routes.rank[place] = rank;
    routes.k[place] = lane;
    routes.scale[place] = scale;
  }
}

// Adds 16 bytes of a token: sums and rounds the rows of each rank, then these sums.
template <class Element>
__device__ uint4 sum_vector(const OrderedRoutes& routes, const std::byte* rows, int64_t row_bytes) {
  float of_rank[Element::kPerVector];
  float total[Element::kPerVector];
  bool is_first_rank = true;
  const auto load = [&](int i) { return ptx::load_16(rows + routes.k[i] * row_bytes); };
  uint4 next = routes.count > 0 ? load(0) : uint4{0, 0, 0, 0};
  for (int i = 0; i < routes.count; ++i) {
    const uint4 bits = next;
    next = i + 1 < routes.count ? load(i + 1) : next;
    const bool begins = i == 0 || routes.rank[i] != routes.rank[i - 1];
    const bool ends = i + 1 == routes.count || routes.rank[i + 1] != routes.rank[i];
    add_vector<Element, true>(bits, routes.scale[i], begins, of_rank);
    if (ends) {
      add_vector<Element, false>(pack<Element>(of_rank), 1.0F, is_first_rank, total);
      is_first_rank = false;
    }
  }
  return routes.count > 0 ? pack<Element>(total) : uint4{0, 0, 0, 0};
}

// Waits, by all threads of a block, until all ranks have sent their rows of a chunk. Returns false
// if the call is given up.
__device__ bool await_token(const CombineLaunch& call, const CallSetup& setup, int chunk) {
  const int peer = static_cast<int>(threadIdx.x);
  bool is_here = true;
  if (peer < call.me.num_ranks) {
    const WaitSite site = {Op::kCombine, setup.epoch, peer, WaitFor::kRows};
    const auto slot = call.me.map.signals().combine(peer, chunk);
    is_here = wait_reached(call.me, signal_of(call.me, call.me.rank, slot), setup.epoch, site);
  }
  return __syncthreads_and(static_cast<int>(is_here)) != 0;
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    sum_rows_by_route(const __grid_constant__ CombineLaunch call) {
  __shared__ CallSetup setup;
  __shared__ OrderedRoutes routes;
  const RankView& me = call.me;
  begin_call(setup, call, true, CallPart::kReceive);
  if (accept_peers(setup, me)) {
    const int num_tokens = call.plan.header()->num_tokens;
    const int64_t row_bytes = call.payload.row_bytes;
    const std::byte* all = control_of(me, me.rank) + me.map.eager_rows_offset(setup.epoch);
    for (int token = static_cast<int>(blockIdx.x); token < num_tokens;
         token += static_cast<int>(gridDim.x)) {
      if (!await_token(call, setup, token / chunk_tokens(num_tokens))) {
        break;
      }
      if (warp_in_block() == 0) {
        order_routes(call, token, routes);
      }
      __syncthreads();
      const std::byte* rows = all + token * int64_t{call.plan.map.max_topk} * row_bytes;
      for (int64_t at = threadIdx.x * 16; at < row_bytes; at += kThreads * 16) {
        const uint4 sum = sum_vector<Element>(routes, rows + at, row_bytes);
        ptx::store_16(call.out + token * row_bytes + at, sum);
      }
      __syncthreads();  // the order is read
    }
  }
  finish_call</*kRenewsApart=*/false>(me, setup.epoch);
}

// Waits for all marks; each thread has some.
__global__ void await_marks(const __grid_constant__ CombineLaunch call) {
  const uint32_t epoch = current_epoch(call.me);
  const auto experts = static_cast<int>(call.plan.map.experts_per_rank.divisor());
  const auto blocks = static_cast<int>(call.ready.marks.cols) / experts;
  for (int i = static_cast<int>(threadIdx.x); i < experts * blocks; i += kThreads) {
    const int expert = i / blocks;
    const int64_t first = i % blocks * call.ready.block_rows;
    if (first < call.plan.rows_per_expert()[expert] &&
        !await_mark(call, epoch, expert, i % blocks)) {
      return;
    }
  }
}

RouteKernel receive_kernel(DType dtype) {
  return with_element(dtype, [&]<class Element>(Element) -> RouteKernel {
    return {sum_rows_by_route<Element>, kThreads};
  });
}

}  // namespace

void prepare_combine_by_route() {
  prepare(RouteKernel{send_rows_by_route, kThreads});
  prepare(RouteKernel{await_marks, kThreads});
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    prepare(receive_kernel(dtype));
  }
}

void launch_combine_by_route(const CombineLaunch& call, CallPart part, cudaStream_t stream) {
  part == CallPart::kSend
      ? launch(RouteKernel{send_rows_by_route, kThreads}, call.num_reduce, call, stream)
      : launch(receive_kernel(call.payload.dtype), call.num_sum, call, stream);
}

void launch_await_marks(const CombineLaunch& call, cudaStream_t stream) {
  launch(RouteKernel{await_marks, kThreads}, 1, call, stream);
}

}  // namespace weft
