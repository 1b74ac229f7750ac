// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/micro_batch.hpp"

#include "train/layers/dense.hpp"

namespace weft::moe {

DeviceHead::DeviceHead(
    GpuRank& rank,
    const DeviceTokens& tokens,
    const DeviceParameter& gain,
    const DeviceParameter& weight
)
    : rank_(&rank), tokens_(&tokens), norm_(rank, tokens, gain), weight_(weight) {
  const auto num_tokens = static_cast<size_t>(tokens.num_tokens);
  logits_.resize(num_tokens * kNumBytes);
  grad_logits_.resize(num_tokens * kNumBytes);
  losses_.resize(num_tokens);
  host_losses_.resize(num_tokens);
}

void DeviceHead::load_targets(std::span<const std::byte> targets) {
  targets_.upload(
      {reinterpret_cast<const uint8_t*>(targets.data()), targets.size()}, rank_->stream()
  );
}

void DeviceHead::forward(const float* x) {
  const cudaStream_t stream = rank_->stream();
  const int64_t num_tokens = tokens_->num_tokens;
  norm_.forward(x);
  rank_->linear().forward(
      {num_tokens, rank_->config().hidden, kNumBytes},
      norm_.normed(),
      weight_.rounded,
      logits_.data()
  );
  cross_entropy_cuda(
      {num_tokens, kNumBytes, logits_.data(), targets_.data(), scale()},
      losses_.data(),
      grad_logits_.data(),
      stream
  );
}

void DeviceHead::backward(float* grad_x) {
  const cudaStream_t stream = rank_->stream();
  DeviceScratch& scratch = rank_->scratch();
  const int64_t num_tokens = tokens_->num_tokens;
  const int64_t hidden = rank_->config().hidden;
  const DeviceLinear::Shape shape = {num_tokens, hidden, kNumBytes};
  rank_->linear().add_backward_weight(shape, grad_logits_.data(), norm_.normed(), weight_.grad);
  scratch.grad_normed.clear(stream);
  rank_->linear().add_backward_input(
      shape, grad_logits_.data(), weight_.rounded, scratch.grad_normed.data()
  );
  WEFT_CUDA(Context{}, cudaMemsetAsync(grad_x, 0, norm_.size() * sizeof(float), stream));
  norm_.backward(grad_x);
}

double DeviceHead::loss() const {
  double sum = 0;
  for (const float loss : host_losses_) {
    sum += static_cast<double>(loss);
  }
  return sum * static_cast<double>(scale());
}

using overlap::Lane;

DeviceMicroBatch::DeviceMicroBatch(
    GpuRank& rank,
    int64_t num_tokens,
    const MicroBatchPlace& place,
    const ModelLayout& layout,
    const DeviceMemory& memory
)
    : rank_(&rank),
      tokens_(std::make_unique<DeviceTokens>(num_tokens, place, rank.config())),
      window_(rank.config().window),
      table_(memory.replicated.at(layout.embedding)),
      head_(
          rank, *tokens_, memory.replicated.at(layout.final_norm), memory.replicated.at(layout.head)
      ),
      windows_(static_cast<size_t>(num_tokens * window_)),
      x_(static_cast<size_t>(num_tokens * rank.config().hidden)) {
  blocks_.reserve(layout.blocks.size());
  for (const BlockLayout& block : layout.blocks) {
    blocks_.emplace_back(rank, *tokens_, block, memory);
  }
}

void DeviceMicroBatch::load(const Batch& batch) {
  const std::span windows(
      reinterpret_cast<const uint8_t*>(batch.windows.data()), batch.windows.size()
  );
  windows_.upload(windows, rank_->stream());
  head_.load_targets(batch.targets);
}

void DeviceMicroBatch::forward_backward() {
  pre_process();
  for (DeviceBlock& block : blocks_) {
    block.pre_dispatch(x_);
    block.moe_dispatch();
    block.mlp();
    block.moe_combine(x_);
  }
  post_process();
  post_process_backward();
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
    block->moe_combine_backward(x_);
    block->mlp_backward();
    block->mlp_weight_gradient();
    block->moe_dispatch_backward();
    block->pre_dispatch_backward(x_);
  }
  pre_process_backward();
}

void DeviceMicroBatch::pre_process() {
  rank_->start(Lane::kCompute, Phase::kDense);
  embedding_forward_cuda(embedding(), table_.value, x_.data(), rank_->stream());
}

void DeviceMicroBatch::post_process() {
  rank_->start(Lane::kCompute, Phase::kDense);
  head_.forward(x_.data());
}

void DeviceMicroBatch::post_process_backward() {
  rank_->start(Lane::kCompute, Phase::kDense);
  head_.backward(x_.data());
}

void DeviceMicroBatch::pre_process_backward() {
  rank_->start(Lane::kCompute, Phase::kDense);
  embedding_backward_cuda(embedding(), x_.data(), table_.grad, rank_->stream());
}

void DeviceMicroBatch::finish() {
  head_.finish();
  for (DeviceBlock& block : blocks_) {
    block.finish();
  }
}

double DeviceMicroBatch::balance() const {
  double sum = 0;
  for (const DeviceBlock& block : blocks_) {
    sum += block.balance_share() / static_cast<double>(blocks_.size());
  }
  return sum;
}

void DeviceMicroBatch::release() {
  tokens_->grad_rows = {};
  for (DeviceBlock& block : blocks_) {
    block.release();
  }
}

EmbeddingShape DeviceMicroBatch::embedding() const {
  return {
      tokens_->num_tokens, window_, rank_->config().hidden, windows_.data(), tokens_->adds_grads};
}

}  // namespace weft::moe
