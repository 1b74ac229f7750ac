// SPDX-License-Identifier: Apache-2.0
// plan on a GPU: queues one kernel, with replicas behind those of balance/call.cpp; the host waits
// for the number of rows only if the caller gave none. Or the host has made the plan, and a kernel
// brings it to the GPUs of the domain. Previous in the data flow: the router, or
// src/hosts/plan_image.cpp; next: plan.cu or import.cu, then dispatch/call.cpp.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>

#include "core/clock.hpp"
#include "cuda/exchange/exchange.hpp"
#include "cuda/plan/download.hpp"
#include "plan/build.hpp"

namespace weft {
namespace {

constexpr uint64_t kMorePlans = 8;
// An image is read over the link to the host: enough threads to keep it busy.
constexpr int kImportBlocks = 16;

// Returns the plan kernel's blocks: for few tokens, blocks that wait for each other cost more than
// they gain.
int plan_blocks(int64_t num_tokens, int num_gpu_sms) {
  const auto wanted = static_cast<int>((num_tokens + 127) / 128);
  return std::clamp(wanted, 1, std::min(kMaxPlanBlocks, num_gpu_sms));
}

class CudaPlan final : public DevicePlan {
 public:
  // The plan's memory, the rank state that made it, and what the host knows of it.
  struct Made {
    std::shared_ptr<const Block> block;
    std::shared_ptr<CudaRankState> maker;
    RankView me;
    PlanMap map;
    int gpu;
    uint64_t exchange_id;
    PlanShape shape;
    uint32_t serial;
  };
  explicit CudaPlan(Made made)
      : made_(std::move(made)), view_{made_.block->data, made_.map, made_.serial} {}

  [[nodiscard]] const PlanView& view() const { return view_; }

  [[nodiscard]] const PlanData& on_host() const override {
    const std::lock_guard lock(mutex_);
    return whole();
  }

  [[nodiscard]] const PlanData& shape_on_host() const override {
    const std::lock_guard lock(mutex_);
    if (!copy_ && !shape_) {
      const CudaDeviceGuard guard(made_.gpu);
      shape_ = download_shape(made_.me, view_, made_.shape, stream());
    }
    return shape_ ? *shape_ : whole();
  }

  [[nodiscard]] Plan::OnDevice on_device() const override {
    const PlanHeader* header = view_.header();
    return {
        &header->num_rows,
        &header->required_rows,
        &header->overflow,
        view_.rows_per_expert(),
        view_.padded_rows_per_expert(),
        view_.expert_begin(),
        made_.shape.options.balance.replicas > 0 ? view_.placement() : nullptr};
  }

 private:
  // Returns a stream behind the plan: not the caller's, which may be gone.
  [[nodiscard]] cudaStream_t stream() const {
    const cudaStream_t stream = made_.maker->stream.get();
    WEFT_CUDA(Context{}, cudaStreamWaitEvent(stream, made_.maker->last_call.get()));
    return stream;
  }

  [[nodiscard]] const PlanData& whole() const {
    if (!copy_) {
      const CudaDeviceGuard guard(made_.gpu);
      PlanData data = download_plan(made_.me, view_, made_.shape, stream());
      data.exchange_id = made_.exchange_id;
      copy_ = std::move(data);
    }
    return *copy_;
  }

  Made made_;
  PlanView view_;
  mutable std::mutex mutex_;
  mutable std::optional<PlanData> copy_;
  mutable std::optional<PlanData> shape_;  // of its output alone
};

// Returns the flag in `host_shape` that the kernel sets when it has written all.
volatile uint32_t* shape_flag(std::byte* host_shape, const PlanMap& map) {
  return reinterpret_cast<volatile uint32_t*>(host_shape + map.shape_bytes());
}

// Refuses for Overflow::kError, with the same text on every rank, as all know every rank's need.
void refuse_overflow(const PlanView& host, const PlanShape& shape, const Context& context) {
  const PlanHeader& header = *host.header();
  WEFT_CHECK_ARG(
      context,
      header.short_rank < 0,
      "plan: rank {} needs {} rows (row_budget = {})",
      header.short_rank,
      header.short_needs,
      header.short_rows
  );
  if (shape.options.layout != Layout::kExpertStrided) {
    return;
  }
  for (int expert = 0; expert < shape.num_experts; ++expert) {
    WEFT_CHECK_ARG(
        context,
        host.global_routes()[expert] <= shape.options.expert_stride,
        "plan: expert {} on rank {} needs {} rows (expert_stride = {})",
        expert,
        expert / shape.num_local_experts(),
        host.global_routes()[expert],
        shape.options.expert_stride
    );
  }
}

}  // namespace

CudaExchange::PreparedPlan CudaExchange::prepare_plan(
    const Routing& routing,
    const PlanOptions& options,
    const PayloadFormat& payload,
    int64_t number,
    cudaStream_t stream
) {
  check_options(options, context_);
  const RoutingShape routes = check_routing(routing, settings_, context_);
  check_balance_of(options.balance, routes.topk);
  balance_ = options.balance;
  PlanData data;
  data.shape = {
      .rank = view_.rank,
      .num_ranks = view_.num_ranks,
      .num_experts = settings_.num_experts + view_.num_ranks * options.balance.replicas,
      .topk = routes.topk,
      .num_tokens = routes.num_tokens,
      .from_map = routes.from_map,
      .has_weights = routing.weights.is_given(),
      .options = options,
      .lost = lost_ranks()};
  const PeerAddress address = take_plan(data, stream);
  if (const auto rows = given_rows(options, data.shape.num_local_experts())) {
    data.num_rows = *rows;
    data.has_output_shape = false;
  }

  PlanLaunch launch;
  launch.me = view_;
  launch.plan = view_of(data);
  launch.plan_address = address;
  const ConstTensor& indices = routes.from_map ? routing.map_indices : routing.topk_idx;
  launch.topk_idx = indices.data;
  launch.num_indices = static_cast<int32_t>(indices.cols);
  launch.map = reinterpret_cast<const bool*>(routes.from_map ? routing.map.data : nullptr);
  launch.weights = reinterpret_cast<const float*>(routing.weights.data);
  launch.index_bytes = static_cast<int32_t>(dtype_bytes(indices.dtype));
  launch.ignores_unknown = routing.ignores_unknown;
  launch.num_tokens = static_cast<int32_t>(routes.num_tokens);
  launch.topk = routes.topk;
  launch.by_topk = FastDivide(static_cast<uint32_t>(routes.topk));
  launch.has_weights = data.shape.has_weights;
  launch.layout = options.layout;
  launch.pad_multiple = options.pad_multiple;
  launch.expert_stride = options.expert_stride;
  launch.row_budget = options.row_budget.value_or(-1);
  const Call call = {
      .op = Op::kPlan,
      .number = number,
      .options = options,
      .topk = routes.topk,
      .from_map = routes.from_map,
      .has_weights = data.shape.has_weights,
      .payload = payload};
  launch.signature = signature_of(call);
  launch.scratch = plan_scratch_.get();
  launch.num_blocks = plan_blocks(routes.num_tokens, num_gpu_sms_);
  return {std::move(data), launch};
}

Plan CudaExchange::make_plan_of(
    Op op, const Routing& routing, const PlanOptions& options, const CallOptions& call
) {
  return run_call(op, call, [&](cudaStream_t stream) {
    auto [data, launch] = prepare_plan(routing, options, {}, call.number, stream);
    const bool waits = data.has_output_shape;
    if (waits) {
      ask_shape(launch);
    }
    is_plan_alone_ = op == Op::kPlanAndDispatch;
    if (options.balance.replicas > 0) {
      queue_balance(options.balance, launch, stream);
    }
    if (waits || options.balance.replicas > 0) {
      launch_plan(launch, stream);
      keep_none();
    } else {
      launch_and_keep(launch_plan, launch, stream);
    }
    set_launched(stream);
    ++counters_.num_plans;
    if (waits) {
      hear_shape(data, launch.plan.map, stream);
      if (options.overflow == Overflow::kError) {
        refuse_overflow({host_shape_.get(), launch.plan.map}, data.shape, context_);
      }
    }
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

Plan CudaExchange::import_plan(
    PlanData data,
    const std::byte* image,
    std::span<const ImportedRecords> records,
    int64_t number,
    cudaStream_t stream
) {
  return run_call(Op::kPlan, {.stream = stream}, [&](cudaStream_t /*stream*/) {
    ImportedPlanLaunch launch;
    launch.me = view_;
    launch.plan_address = take_plan(data, stream);
    launch.plan = view_of(data);
    launch.image = image;
    std::ranges::copy(records, std::begin(launch.to));
    launch.num_tokens = static_cast<int32_t>(data.shape.num_tokens);
    const Call imported = {
        .op = Op::kPlan,
        .plan_number = number,
        .options = data.shape.options,
        .topk = data.shape.topk};
    launch.signature = signature_of(imported);
    launch.num_blocks = std::min(kImportBlocks, num_gpu_sms_);
    launch_imported_plan(launch, stream);
    set_launched(stream);
    ++counters_.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

PeerAddress CudaExchange::take_plan(PlanData& data, cudaStream_t stream) {
  const bool is_captured = is_capturing(stream, context_);
  if (!is_captured) {
    plans_->look_ahead();
  }
  auto block = plans_->take(is_captured);
  if (!block) {
    WEFT_CHECK(
        context_,
        !is_captured,
        ErrorCode::kUnsupported,
        "plan: memory for one more plan is needed inside a capture (keep as many plans alive once "
        "before it)"
    );
    add_plans(kMorePlans);
    block = plans_->take(is_captured);
  }
  data.exchange_id = id_;
  const int gpu = settings_.device.index;
  const PlanMap map = plan_map(data.shape.options.balance.replicas);
  const auto plan = std::make_shared<CudaPlan>(CudaPlan::Made{
      block, own_, view_, map, gpu, id_, data.shape, ++num_plans_});
  data.device = plan;
  if (repeats_) {
    repeats_->keep_plan(plan, plan->view());
  }
  return block->address;
}

PlanView CudaExchange::view_of(const PlanData& plan) const {
  return device_plan_as<CudaPlan>(plan, context_).view();
}

void CudaExchange::ask_shape(PlanLaunch& launch) {
  *shape_flag(host_shape_.get(), launch.plan.map) = 0;
  launch.host_shape = host_shape_.get();
}

void CudaExchange::hear_shape(PlanData& data, const PlanMap& map, cudaStream_t stream) {
  wait_shape(shape_flag(host_shape_.get(), map), stream);
  const PlanView shape = {host_shape_.get(), map};
  read_output_shape(shape, data);
  data.num_sent = {shape.sent(), shape.sent() + view_.num_ranks};
  data.num_received = {shape.received(), shape.received() + view_.num_ranks};
}

// The kernel's own waits are bounded, so the stream comes to an end in any case.
void CudaExchange::wait_shape(const volatile uint32_t* seen, cudaStream_t stream) {
  const LossWatch::Wait wait(losses_.get());
  is_waiting_for_shape_ = true;
  const std::unique_ptr<bool, void (*)(bool*)> until_end(
      &is_waiting_for_shape_, [](bool* is_waiting) { *is_waiting = false; }
  );
  const auto start = Clock::now();
  auto look = start + std::chrono::milliseconds(5);
  while (*seen == 0) {
    check_faults(stream);
    if (Clock::now() < look) {
      continue;
    }
    look = Clock::now() + std::chrono::milliseconds(25);
    look_for_interrupts(stream);
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // it is no error of the next launch
    } else {
      WEFT_CUDA(context_, state);
      check_faults(stream);
      const auto code = ErrorCode::kInternal;
      WEFT_CHECK(context_, *seen != 0, code, "plan: the kernel ended without a result");
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  counters_.host_wait_seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace weft
