// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/micro_batch.hpp"

namespace weft::moe {

using overlap::Lane;

DeviceMicroBatch::DeviceMicroBatch(
    GpuRank& rank,
    int64_t num_tokens,
    bool is_first,
    bool is_last,
    const ModelLayout& layout,
    const DeviceMemory& memory
)
    : rank_(&rank),
      tokens_(std::make_unique<DeviceTokens>(num_tokens, is_first, is_last, rank.config())),
      window_(rank.config().window),
      table_(memory.replicated.at(layout.embedding)),
      norm_(rank, *tokens_, memory.replicated.at(layout.final_norm)),
      head_weight_(memory.replicated.at(layout.head)),
      windows_(static_cast<size_t>(num_tokens * window_)),
      x_(static_cast<size_t>(num_tokens * rank.config().hidden)),
      logits_(static_cast<size_t>(num_tokens * kNumBytes)),
      grad_logits_(logits_.size()),
      losses_(static_cast<size_t>(num_tokens)),
      host_losses_(losses_.size()) {
  blocks_.reserve(layout.blocks.size());
  for (const BlockLayout& block : layout.blocks) {
    blocks_.emplace_back(rank, *tokens_, block, memory);
  }
}

void DeviceMicroBatch::load(const Batch& batch) {
  const auto upload = [&](DeviceArray<uint8_t>& to, const std::vector<std::byte>& from) {
    to.upload({reinterpret_cast<const uint8_t*>(from.data()), from.size()}, rank_->stream());
  };
  upload(windows_, batch.windows);
  upload(targets_, batch.targets);
}

void DeviceMicroBatch::pre_process() {
  rank_->start(Lane::kCompute, Phase::kDense);
  embedding_forward_cuda(embedding(), table_.value, x_.data(), rank_->stream());
}

void DeviceMicroBatch::post_process() {
  rank_->start(Lane::kCompute, Phase::kDense);
  norm_.forward(x_.data());
  rank_->linear().forward(head_shape(), norm_.normed(), head_weight_.rounded, logits_.data());
  cross_entropy_cuda(
      {tokens_->num_tokens, kNumBytes, logits_.data(), targets_.data(), loss_scale()},
      losses_.data(),
      grad_logits_.data(),
      rank_->stream()
  );
}

void DeviceMicroBatch::post_process_backward() {
  rank_->start(Lane::kCompute, Phase::kDense);
  DeviceArray<float>& grad_normed = rank_->scratch().grad_normed;
  rank_->linear().add_backward_weight(
      head_shape(), grad_logits_.data(), norm_.normed(), head_weight_.grad
  );
  grad_normed.clear(rank_->stream());
  rank_->linear().add_backward_input(
      head_shape(), grad_logits_.data(), head_weight_.rounded, grad_normed.data()
  );
  x_.clear(rank_->stream());
  norm_.backward(x_.data());
}

void DeviceMicroBatch::pre_process_backward() {
  rank_->start(Lane::kCompute, Phase::kDense);
  embedding_backward_cuda(embedding(), x_.data(), table_.grad, rank_->stream());
}

void DeviceMicroBatch::finish() {
  losses_.download(host_losses_, rank_->stream());
  for (DeviceBlock& block : blocks_) {
    block.finish();
  }
}

double DeviceMicroBatch::cross_entropy() const {
  double sum = 0;
  for (const float loss : host_losses_) {
    sum += static_cast<double>(loss);
  }
  return sum * static_cast<double>(loss_scale());
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
      tokens_->num_tokens, window_, rank_->config().hidden, windows_.data(), !tokens_->is_first};
}

}  // namespace weft::moe
