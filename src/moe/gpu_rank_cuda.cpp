// SPDX-License-Identifier: Apache-2.0
#include "moe/gpu_rank_cuda.hpp"

#include <algorithm>
#include <type_traits>

#include "moe/kernels_cuda.hpp"

namespace weft::moe {

GpuStream::GpuStream(int device) {
  WEFT_CUDA(Context{}, cudaSetDevice(device));
  WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

GpuStream::~GpuStream() {
  static_cast<void>(cudaStreamDestroy(stream_));
}

GpuRank::GpuRank(const Group& group, MoeContext& context, int64_t num_tokens)
    : group_(&group),
      context_(&context),
      num_tokens_(num_tokens),
      shares_process_(group.num_ranks() > 1 && group.topology().one_process),
      stream_(context.exchange.config().device.index),
      linear_(stream_.get()) {
  const ModelConfig& model = context.config;
  const auto elements = [&](int cols) { return static_cast<size_t>(num_tokens * cols); };
  scratch_.tokens.resize(elements(model.hidden));
  scratch_.grad_normed.resize(elements(model.hidden));
  scratch_.gain_terms.resize(elements(model.hidden));
  scratch_.grad_logits.resize(elements(model.num_experts));
  scratch_.grad_weights.resize(elements(model.topk));
  const int64_t most_cols = std::max(model.hidden, model.num_experts);
  scratch_.sum_parts.resize(static_cast<size_t>(kSumParts * most_cols));
}

void GpuRank::enter() const {
  WEFT_CUDA(Context{}, cudaSetDevice(context_->exchange.config().device.index));
}

void GpuRank::start(Phase phase) {
  synchronize();
  context_->timer.start(phase);
}

void GpuRank::synchronize() {
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream_.get()));
  context_->exchange.check();
}

// Threads of one process share what CUDA locks: a rank that allocates, or loads a kernel at its
// first launch, may have to wait for kernels that run, and they for this rank's part of the call.
// So all ranks begin an exchange together and none goes on before its own kernel is through.
void GpuRank::meet() {
  if (shares_process_) {
    synchronize();
    group_->barrier();
  }
}

void GpuRank::part() {
  if (shares_process_) {
    synchronize();
  }
}

template <class Data>
auto GpuRank::tensor(Data* data, DType dtype, int64_t rows, int64_t cols) const {
  using Byte = std::conditional_t<std::is_const_v<Data>, const std::byte, std::byte>;
  using View = std::conditional_t<std::is_const_v<Data>, ConstTensor, Tensor>;
  if (data == nullptr) {
    return View{};
  }
  return View{
      reinterpret_cast<Byte*>(data), dtype, rows, cols, -1, context_->exchange.config().device};
}

Plan GpuRank::plan(const int32_t* topk_idx) {
  meet();
  Plan plan = context_->exchange.plan(
      {.topk_idx = tensor(topk_idx, DType::kInt32, num_tokens_, config().topk)},
      {.layout = Layout::kExpertMajor},
      {.stream = stream_.get()}
  );
  part();
  return plan;
}

Buffer GpuRank::dispatch(
    const Plan& plan, const uint16_t* x, const float* weights, float* row_weights
) {
  Exchange& exchange = context_->exchange;
  Buffer rows = exchange.allocate(plan.num_rows(), config().hidden, DType::kBFloat16);
  meet();
  exchange.dispatch(
      plan,
      {.x = tensor(x, DType::kBFloat16, num_tokens_, config().hidden),
       .weights = tensor(weights, DType::kFloat32, num_tokens_, config().topk)},
      {.rows = rows.tensor(), .weights = tensor(row_weights, DType::kFloat32, plan.num_rows(), 1)},
      {.stream = stream_.get()}
  );
  part();
  context_->dispatch.count(plan, rows.tensor().row_bytes());
  return rows;
}

void GpuRank::combine(
    const Plan& plan, const uint16_t* rows, const float* row_grads, uint16_t* x, float* grads
) {
  const Tensor out = tensor(x, DType::kBFloat16, num_tokens_, config().hidden);
  meet();
  context_->exchange.combine(
      plan,
      {.rows = tensor(rows, DType::kBFloat16, plan.num_rows(), config().hidden),
       .weights = tensor(row_grads, DType::kFloat32, plan.num_rows(), 1)},
      {.x = out, .weights = tensor(grads, DType::kFloat32, num_tokens_, config().topk)},
      {.stream = stream_.get()}
  );
  part();
  context_->combine.count(plan, out.row_bytes());
}

}  // namespace weft::moe
