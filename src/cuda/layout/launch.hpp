// SPDX-License-Identifier: Apache-2.0
// The kernels as the host sees them: for each operation one struct of parameters, a function that
// prepares its kernels, once per device and before any capture, and one that launches them. All
// pointers are device memory of this rank unless said otherwise. A launch allocates nothing and may
// be captured. Each function throws Error (kCuda) if CUDA refuses it.
//
// The structs are filled in by call.cpp of plan/, dispatch/ and combine/; the functions are defined
// in the .cu files.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/layout/control.hpp"
#include "cuda/layout/plan.hpp"
#include "weft/exchange.hpp"

namespace weft {

inline constexpr int kMaxPlanBlocks = 32;  // a guess: each block adds up the counts of all others

struct PlanLaunch {
  RankView me;
  PlanView plan;
  PeerAddress plan_address;        // of the block, for peers
  const void* topk_idx = nullptr;  // [num_tokens, topk] of `index_bytes` bytes each, or
  const bool* map = nullptr;       // [num_tokens, num_experts]; then topk_idx
                                   // [num_tokens, num_indices] is only checked, unless it is null
  const float* weights = nullptr;  // shaped like either; null: none
  int32_t index_bytes = 8;
  int32_t num_indices = 0;
  bool ignores_unknown = false;  // Routing's
  bool has_weights = false;      // also of ranks without tokens, whose pointer may be null
  // The second half of a plan with replicas, behind launch_swap_counts() of cuda/plan/balance: of
  // physical experts. The plan has the weights already.
  bool is_second = false;
  // Routes to experts of lost ranks stay: a placement may have copies of them elsewhere.
  bool keeps_lost = false;
  int32_t num_tokens = 0;
  int32_t topk = 0;  // max_topk for a map
  FastDivide by_topk;
  Layout layout = Layout::kExpertMajor;
  int64_t pad_multiple = 1;
  int64_t expert_stride = 0;
  int64_t row_budget = -1;  // -1: exact
  Signature signature;
  std::byte* host_shape = nullptr;  // pinned: PlanMap::shape_bytes() and a uint32 flag; or null
  int32_t* scratch = nullptr;       // plan_scratch_bytes()
  int32_t num_blocks = 1;           // at most kMaxPlanBlocks
  int32_t num_parts = 1;  // of each rank's tokens, one per block; with RoutedDispatchLaunch only
};

[[nodiscard]] uint64_t plan_scratch_bytes(const PlanMap& map);
// Called once per device, before any capture.
void prepare_plan(const PlanMap& map);
void launch_plan(const PlanLaunch& call, cudaStream_t stream);
// One block waits for the records of the call that made `plan`. The plan's has_records() says
// afterwards whether all have come.
void launch_wait_records(const RankView& me, const PlanView& plan, cudaStream_t stream);

// An imported plan, whose slots the host has found. `image` is host memory that the GPU reads: this
// rank's plan block up to PlanMap::chunk_begin(0), then the records of each receiver.
struct ImportedPlanLaunch {
  RankView me;
  PlanView plan;
  PeerAddress plan_address;
  const std::byte* image = nullptr;
  ImportedRecords to[kMaxDomainRanks];
  int32_t num_tokens = 0;
  Signature signature;
  int32_t num_blocks = 1;
};

void prepare_imported_plan();
void launch_imported_plan(const ImportedPlanLaunch& call, cudaStream_t stream);

// Parameters that a dispatch and a combine have in common.
struct RowsLaunch {
  RankView me;
  PlanView plan;
  PayloadFormat payload;
  int32_t topk = 0;
  bool from_map = false;
  bool one_row = false;          // rank_major
  CopiedLaunch copied;           // .rows always, the rest only of a call by copy engines
  Signature signature;           // the plan number is filled in on the device
  Mover mover = Mover::kVector;  // not kAuto
};

struct DispatchLaunch : RowsLaunch {
  const std::byte* x = nullptr;       // [num_tokens] rows of payload.row_bytes
  const float* weights = nullptr;     // [num_tokens, topk] or [num_tokens, num_experts]; null: none
  const std::byte* scales = nullptr;  // [num_tokens] rows of payload.scale_bytes; null: none
  const float* global_scale = nullptr;  // of NVFP4; null: 1
  std::byte* out_rows = nullptr;        // [num_rows] of payload.out_row_bytes()
  float* out_weights = nullptr;         // [num_rows, row_weight_cols]
  std::byte* out_scales = nullptr;      // [num_rows] rows of payload.scale_bytes
  int32_t* out_sources = nullptr;       // [num_rows, 2]; null: not wanted, as of those below
  int64_t* out_experts = nullptr;       // [num_rows, topk]
  int32_t* out_counts = nullptr;        // [num_local_experts]
  int32_t* count_sums = nullptr;        // likewise
  int64_t num_rows = 0;
  ScaleLayout scale_layout = ScaleLayout::kByRow;
  int32_t scale_stride = 0;  // rows of an expert's block, where scales do not lie by row
  bool has_padding = false;  // between the blocks of experts there may be rows to be zeroed
  PeerAddress rows_target;   // out_rows for peers, or this rank's staging
  Place place = Place::kStaging;
  PeerAddress scales_target;         // this rank's staging of scale rows, if there are scales
  std::byte* staged_rows = nullptr;  // the two, as this rank sees them
  std::byte* staged_scales = nullptr;
  int32_t num_push = 1;  // blocks of each role
  int32_t num_fan_out = 1;
  // Only with Place::kEager, where no plan says it.
  const void* topk_idx = nullptr;  // [num_tokens, topk] of `index_bytes` bytes each
  int32_t index_bytes = 8;
  int32_t num_tokens = 0;
};

inline constexpr unsigned kRoutedThreads =
    512;  // of a block: kMaxPlanThreads, as blocks make plans
// Bytes of shared memory that a block has in addition to what a launch asks for. fused.cu asserts
// it.
inline constexpr uint32_t kMostStaticShared = 8 << 10;

// A plan and the dispatch by it in one launch. The first plan.num_blocks blocks make the plan; the
// others push eager rows (Place::kEager), then wait for the plan and fan out.
struct RoutedDispatchLaunch {
  PlanLaunch plan;
  DispatchLaunch dispatch;
  int32_t num_blocks = 2;  // in all
};

// A RoutedDispatchLaunch with replicas: the plan is of physical experts, plan.topk_idx of those
// that tokens choose among. Rows are pushed once the blocks that plan know where they go.
struct BalancedDispatchLaunch : RoutedDispatchLaunch {
  FastDivide chosen_per_rank;  // experts
  int32_t min_rows = 1;        // as in BalanceLaunch
  int32_t block_rows = 1;
  int64_t replica_rows = 0;
  bool is_given = false;  // replicas lie where `placement` says; else they are planned
  int16_t placement[kMaxDomainRanks * kMostReplicas] = {};  // [num_ranks, replicas], -1: none
};

struct CombineLaunch : RowsLaunch {
  const std::byte* rows = nullptr;        // [num_rows, hidden]
  const float* row_weights = nullptr;     // [num_rows, row_weight_cols]; null: none
  const float* source_weights = nullptr;  // kSourceWeights: [num_tokens, topk or num_experts]
  const void* source_idx = nullptr;       // likewise, of `index_bytes` bytes each; null: none
  int32_t index_bytes = 8;
  bool has_source_weights = false;  // also of ranks without tokens, whose pointer may be null
  std::byte* out = nullptr;         // [num_tokens, hidden]
  float* out_weights = nullptr;     // [num_tokens, topk or num_experts]
  CombineScale scale = CombineScale::kNone;
  // [num_tokens, min(num_ranks, topk)] rows, with SumOrder::kTopk [num_tokens, topk], for peers; by
  // copy engines where this rank copies to in a peer's control region.
  PeerAddress staging;
  std::byte* staged = nullptr;  // the same, as this rank sees it
  bool is_eager = false;        // sums and weights go among the eager rows instead
  bool is_short = false;        // a chunk of any rank is one token, and a block has few: OneEntry
  bool reads_own = false;       // see reads_own_rows()
  bool is_by_choice = false;    // SumOrder::kTopk
  bool codes_output = false;    // with payload.wire: `out` are rows of payload.wire_bytes
  RowMarks ready;
  int32_t num_reduce = 1;  // blocks of each role
  int32_t num_sum = 1;
};

static_assert(
    sizeof(PlanLaunch) <= 4096 && sizeof(ImportedPlanLaunch) <= 4096 &&
        sizeof(BalancedDispatchLaunch) <= 4096 && sizeof(CombineLaunch) <= 4096,
    "a kernel takes 4 KB of parameters"
);

// Returns whether a dispatch writes more than rows.
[[nodiscard]] WEFT_HD inline bool has_extras(const DispatchLaunch& call) {
  return call.out_weights != nullptr || call.out_scales != nullptr || call.out_sources != nullptr ||
         call.out_experts != nullptr || call.out_counts != nullptr || call.count_sums != nullptr;
}

// Returns whether the sum role reads the rows of this rank's own tokens where the caller has them:
// nothing must be summed before, as there is one row for each token or one for each choice, nor
// coded. The other role leaves them out then.
[[nodiscard]] WEFT_HD inline bool reads_own_rows(const CombineLaunch& call) {
  return call.reads_own;
}

// Returns whether all rows are of this rank's own tokens, several for each, and one role adds them.
[[nodiscard]] inline bool is_alone(const CombineLaunch& call) {
  return call.me.num_ranks == 1 && !call.one_row && call.payload.wire == Wire::kNone;
}

// Returns this rank's handshake of a call, except for what only the device knows.
[[nodiscard]] WEFT_HD inline DeviceHandshake word_of(const DispatchLaunch& call) {
  DeviceHandshake word;
  word.op = Op::kDispatch;
  word.place = call.place;
  word.rows = call.rows_target;
  word.scales = call.scales_target;
  word.number = call.copied.number;
  word.signature = call.signature;
  return word;
}
[[nodiscard]] WEFT_HD inline DeviceHandshake word_of(const CombineLaunch& call) {
  DeviceHandshake word;
  word.op = Op::kCombine;
  word.rows = call.staging;
  word.number = call.copied.number;
  word.signature = call.signature;
  return word;
}

// Returns how many tokens one block of combine's sum role works on at the same time.
[[nodiscard]] int sums_at_once(const CombineLaunch& call, int64_t num_tokens);

// Microseconds of waits that are added to sums: for each of `count` ranks what the host knows and,
// with `local`, what this GPU has waited for the rank in the same place of its domain.
struct WaitSums {
  const LocalState* local = nullptr;
  int64_t* sums = nullptr;  // by rank
  int64_t times = 1;        // each
  int32_t count = 0;
  int32_t ranks[kMaxDomainRanks] = {};
  int64_t host_us[kMaxDomainRanks] = {};
};

// Each is called once per device, before any capture.
void prepare_dispatch();
void prepare_copied_dispatch();
void prepare_routed_dispatch();
void prepare_combine();
void prepare_topk_combine();
void prepare_combine_by_route();
void prepare_coded_combine();
void prepare_copied_combine();
void prepare_refusal();
void prepare_waits();
void prepare_gate();
void launch_dispatch(const DispatchLaunch& call, cudaStream_t stream);
void launch_routed_dispatch(const RoutedDispatchLaunch& call, CallPart part, cudaStream_t stream);
// Places the rows of a routed dispatch again, before the next call.
void launch_place_rows(const DispatchLaunch& call, int num_blocks, cudaStream_t stream);
void launch_balanced_dispatch(const BalancedDispatchLaunch& call, cudaStream_t stream);
// Returns the shared memory that its blocks need, beside kMostStaticShared, for up to `num_routes`
// of a rank.
[[nodiscard]] uint64_t balanced_shared_bytes(const PlanMap& map, uint32_t num_routes);
void launch_combine(const CombineLaunch& call, cudaStream_t stream);
void launch_topk_combine(const CombineLaunch& call, cudaStream_t stream);  // SumOrder::kTopk
// Launches a part of a combine by source weights (combine/by_route.cu): kSend of call.num_reduce
// blocks, or kReceive of call.num_sum.
void launch_combine_by_route(const CombineLaunch& call, CallPart part, cudaStream_t stream);
// One block waits for all marks of call.ready.
void launch_await_marks(const CombineLaunch& call, cudaStream_t stream);
// Launches a combine with payload.wire.
void launch_coded_combine(const CombineLaunch& call, cudaStream_t stream);

// Launch the kernels of a call by copy engines: one before the copies, one after them.
void launch_dispatch_pack(const DispatchLaunch& call, cudaStream_t stream);
void launch_combine_pack(const CombineLaunch& call, cudaStream_t stream);
void launch_dispatch_fan_out(const DispatchLaunch& call, cudaStream_t stream);
void launch_combine_sum(const CombineLaunch& call, cudaStream_t stream);

// Tells every peer that this rank does not run its next call, which is `op`.
void launch_refusal(const RankView& me, Op op, cudaStream_t stream);

void launch_add_waits(const WaitSums& call, cudaStream_t stream);

// The gate behind calls (GateState).
struct GateLaunch {
  RankView me;
  uint64_t number = 0;  // ascending
  // Two numbers in pinned host memory: that of the last gate that has ended, and that of the one
  // that holds (0: none).
  uint64_t* done = nullptr;
  bool is_repeated = false;  // behind calls made again, while the gate of the first time holds
};
void launch_gate(const GateLaunch& call, cudaStream_t stream);
// Takes lost ranks out of an older plan: its routes to them have no row, and they have no tokens in
// it. Its rows stay where they are.
void launch_forget_lost(const RankView& me, const PlanView& plan, cudaStream_t stream);

}  // namespace weft
