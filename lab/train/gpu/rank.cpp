// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/rank.hpp"

#include <algorithm>
#include <array>
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

// Rows are counted here from the routing, because a plan on a GPU would have to come to the host as
// a whole to tell.
CountedPlan GpuRank::plan(int64_t num_tokens, const int32_t* topk_idx) {
  meet();
  Plan plan = context_->exchange.plan(
      {.topk_idx = tensor(topk_idx, DType::kInt32, num_tokens, config().topk)},
      {.layout = Layout::kExpertMajor},
      {.stream = exchange_stream_.get()}
  );
  part();
  const auto rows = plan.rows_per_expert();
  const int64_t logical_rows = std::reduce(rows.begin(), rows.end(), int64_t{0});
  return {std::move(plan), num_tokens, count_wire_rows(num_tokens, topk_idx), logical_rows};
}

// A token crosses once to each other rank that has one of its experts.
int64_t GpuRank::count_wire_rows(int64_t num_tokens, const int32_t* topk_idx) {
  const int topk = config().topk;
  host_topk_idx_.resize(static_cast<size_t>(num_tokens * topk));
  if (host_topk_idx_.empty()) {
    return 0;
  }
  const size_t num_bytes = host_topk_idx_.size() * sizeof(int32_t);
  WEFT_CUDA(
      Context{},
      cudaMemcpyAsync(
          host_topk_idx_.data(), topk_idx, num_bytes, cudaMemcpyDeviceToHost, exchange_stream_.get()
      )
  );
  wait_for_exchange();
  const int experts_per_rank = config().num_experts / group_->num_ranks();
  int64_t num_rows = 0;
  for (size_t first = 0; first < host_topk_idx_.size(); first += static_cast<size_t>(topk)) {
    std::array<int, kMaxTopk + 1> ranks = {group_->rank()};  // of this token, and its own
    auto last = ranks.begin() + 1;
    for (int k = 0; k < topk; ++k) {
      const int32_t expert = host_topk_idx_[first + static_cast<size_t>(k)];
      const int rank = expert < 0 ? group_->rank() : expert / experts_per_rank;
      if (std::find(ranks.begin(), last, rank) == last) {
        *last++ = rank;
        ++num_rows;
      }
    }
  }
  return num_rows;
}

// The exchange has room for copies if they are to be made.
CallOptions GpuRank::call(bool is_overlapped, bool is_dispatch) const {
  CallOptions call = {.stream = exchange_stream_.get()};
  if (is_overlapped && context_->has_two_lanes) {
    call.copy_engines = context_->exchange.config().copy_engines;
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
  context_->exchange.dispatch(counted.plan, in, out, call(is_overlapped, true));
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
  context_->exchange.combine(counted.plan, in, out, call(is_overlapped, false));
  part();
  context_->combine.count(counted, out.x.row_bytes());
}

}  // namespace weft::moe
