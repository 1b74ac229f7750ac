// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/rank.hpp"

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>

#include "core/gpu/check.hpp"

namespace weft::moe {
namespace {

using overlap::Lane;

// What follows on this thread is for this GPU.
GpuStream enter_gpu(int gpu) {
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  return GpuStream(gpu);
}

}  // namespace

void LanePhases::mark(overlap::Lane lane, std::optional<Phase> phase, cudaStream_t stream) {
  Marks& marks = marks_[overlap::lane_idx(lane)];
  if (marks.num == marks.all.size()) {
    marks.all.emplace_back();
  }
  Mark& mark = marks.all[marks.num++];
  mark.phase = phase;
  mark.event.record(stream);
}

void LanePhases::read(overlap::Lane lane, PhaseTimer& timer) {
  Marks& marks = marks_[overlap::lane_idx(lane)];
  for (size_t i = 0; i + 1 < marks.num; ++i) {
    const Mark& mark = marks.all[i];
    if (mark.phase) {
      timer.add(*mark.phase, marks.all[i + 1].event.ms_after(mark.event) / 1e3);
    }
  }
  marks.num = 0;
}

GpuRank::GpuRank(const Group& group, MoeContext& context, int64_t most_tokens)
    : group_(&group),
      context_(&context),
      shares_process_(group.num_ranks() > 1 && group.topology().one_process),
      stream_(enter_gpu(context.exchange.config().device.index)),
      exchange_stream_(
          context.has_two_lanes ? GpuStream(context.exchange.config().device.index) : stream_
      ),
      math_(stream_.get()),
      scratch_(most_tokens, context.config) {
  const int gpu = context.exchange.config().device.index;
  WEFT_CUDA(Context{}, cudaDeviceGetAttribute(&num_gpu_sms_, cudaDevAttrMultiProcessorCount, gpu));
  const ModelConfig& model = context.config;
  math_.reserve(
      static_cast<size_t>(most_tokens * model.hidden), std::max(model.hidden, model.num_experts)
  );
}

void GpuRank::enter() const {
  WEFT_CUDA(Context{}, cudaSetDevice(context_->exchange.config().device.index));
}

void GpuRank::start(Lane lane, Phase phase) {
  if (context_->has_two_lanes) {
    phases_.mark(lane, phase, stream(lane));
    return;
  }
  synchronize();
  context_->timer.start(phase);
}

void GpuRank::pause(Lane lane) {
  if (context_->has_two_lanes) {
    phases_.mark(lane, std::nullopt, stream(lane));
  }
}

void GpuRank::read_phases() {
  for (const Lane lane : {Lane::kCompute, Lane::kExchange}) {
    phases_.read(lane, context_->timer_of(lane));
  }
}

void GpuRank::synchronize() {
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_.get()));
  wait_for_exchange();
}

void GpuRank::wait_for_exchange() {
  WEFT_CUDA(Context{}, cudaStreamSynchronize(exchange_stream_.get()));
  context_->exchange.check();
  if (context_->replica_exchange != nullptr) {
    context_->replica_exchange->check();
  }
}

// Threads of one process share what CUDA locks: a rank that allocates, or loads a kernel at its
// first launch, may have to wait for kernels that run, and they for this rank's part of the call.
// So all ranks begin an exchange together and none goes on before its own kernel is through.
void GpuRank::meet() {
  if (shares_process_) {
    wait_for_exchange();
    group_->barrier();
  }
}

void GpuRank::part() {
  if (shares_process_) {
    wait_for_exchange();
  }
}

template <class Data>
auto GpuRank::tensor(Data* data, DType dtype, int64_t rows, int64_t cols) const {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  using View = std::conditional_t<std::is_const_v<Data>, ConstTensor, Tensor>;
  return View{
      reinterpret_cast<Byte*>(data), dtype, rows, cols, -1, context_->exchange.config().device};
}

CountedPlan GpuRank::plan(int64_t num_tokens, const int32_t* topk_idx) {
  meet();
  Plan plan = context_->exchange.plan(
      {.topk_idx = tensor(topk_idx, DType::kInt32, num_tokens, config().topk)},
      context_->plan_options(),
      {.stream = exchange_stream_.get()}
  );
  part();
  // What the host knows without a copy of the whole plan.
  int64_t wire_rows = -plan.sent_arrivals(plan.rank());
  for (int rank = 0; rank < plan.num_ranks(); ++rank) {
    wire_rows += plan.sent_arrivals(rank);
  }
  const auto rows = plan.rows_per_expert();
  const int64_t logical_rows = std::reduce(rows.begin(), rows.end(), int64_t{0});
  return {std::move(plan), num_tokens, wire_rows, logical_rows};
}

// The exchange has room for copies if they are to be made.
CallOptions GpuRank::call(const Exchange& exchange, bool is_overlapped, bool is_dispatch) const {
  CallOptions call = {.stream = exchange_stream_.get()};
  if (is_overlapped && context_->has_two_lanes) {
    call.copy_engines = exchange.config().copy_engines;
    call.num_sms = overlap::overlapped_sms(num_gpu_sms_, is_dispatch && call.copy_engines);
  }
  return call;
}

Buffer GpuRank::dispatch(
    const CountedPlan& counted,
    bool is_overlapped,
    const uint16_t* x,
    const std::optional<TravellingWeights>& weights
) {
  const int64_t num_rows = counted.plan.num_rows();
  Buffer rows = context_->exchange.allocate(num_rows, config().hidden, DType::kBFloat16);
  DispatchInput in = {.x = tensor(x, DType::kBFloat16, counted.num_tokens, config().hidden)};
  DispatchOutput out = {.rows = rows.tensor()};
  if (weights) {
    in.weights = tensor(weights->from, DType::kFloat32, counted.num_tokens, config().topk);
    out.weights = tensor(weights->to, DType::kFloat32, num_rows, 1);
  }
  meet();
  Exchange& exchange = context_->exchange;
  exchange.dispatch(counted.plan, in, out, call(exchange, is_overlapped, true));
  part();
  context_->dispatch.count(counted, rows.tensor().row_bytes());
  return rows;
}

void GpuRank::combine(
    const CountedPlan& counted,
    bool is_overlapped,
    const uint16_t* rows,
    uint16_t* x,
    const std::optional<TravellingWeights>& weights
) {
  const int64_t num_rows = counted.plan.num_rows();
  CombineInput in = {.rows = tensor(rows, DType::kBFloat16, num_rows, config().hidden)};
  CombineOutput out = {.x = tensor(x, DType::kBFloat16, counted.num_tokens, config().hidden)};
  if (weights) {
    in.weights = tensor(weights->from, DType::kFloat32, num_rows, 1);
    out.weights = tensor(weights->to, DType::kFloat32, counted.num_tokens, config().topk);
  }
  meet();
  Exchange& exchange = context_->exchange;
  exchange.combine(counted.plan, in, out, call(exchange, is_overlapped, false));
  part();
  context_->combine.count(counted, out.x.row_bytes());
}

Plan GpuRank::plan_weights(int64_t num_tokens, const std::vector<int32_t>& topk_idx) {
  Exchange& exchange = *context_->replica_exchange;
  moved_to_.upload(topk_idx, exchange_stream_.get());
  meet();
  Plan plan = exchange.plan(
      {.topk_idx = tensor(moved_to_.data(), DType::kInt32, num_tokens, exchange.config().max_topk)},
      {.layout = Layout::kExpertMajor, .order = SumOrder::kTopk},
      {.stream = exchange_stream_.get()}
  );
  part();
  return plan;  // it has waited for the stream: the host's memory has been read
}

void GpuRank::send_weights(
    const Plan& moves, bool is_overlapped, const uint16_t* from, uint16_t* to
) {
  Exchange& exchange = *context_->replica_exchange;
  const int64_t hidden = config().hidden;
  meet();
  exchange.dispatch(
      moves,
      {.x = tensor(from, DType::kBFloat16, moves.num_tokens(), hidden)},
      {.rows = tensor(to, DType::kBFloat16, moves.num_rows(), hidden)},
      call(exchange, is_overlapped, true)
  );
  part();
}

void GpuRank::sum_gradients(const Plan& moves, bool is_overlapped, const float* from, float* to) {
  Exchange& exchange = *context_->replica_exchange;
  const int64_t hidden = config().hidden;
  meet();
  exchange.combine(
      moves,
      {.rows = tensor(from, DType::kFloat32, moves.num_rows(), hidden)},
      {.x = tensor(to, DType::kFloat32, moves.num_tokens(), hidden)},
      call(exchange, is_overlapped, false)
  );
  part();
}

void GpuRank::copy(const uint16_t* from, uint16_t* to, int64_t size) const {
  const size_t num_bytes = static_cast<size_t>(size) * sizeof(uint16_t);
  WEFT_CUDA(
      Context{},
      cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, exchange_stream_.get())
  );
}

}  // namespace weft::moe
