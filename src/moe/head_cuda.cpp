// SPDX-License-Identifier: Apache-2.0
#include "moe/head_cuda.hpp"

#include "moe/embedding.hpp"

namespace weft::moe {

DeviceHead::DeviceHead(
    GpuRank& rank,
    const DeviceTokens& tokens,
    const DeviceParameter& gain,
    const DeviceParameter& weight
)
    : rank_(&rank), tokens_(&tokens), gain_(gain), weight_(weight) {
  const auto num_tokens = static_cast<size_t>(tokens.num_tokens);
  const size_t num_elements = num_tokens * static_cast<size_t>(rank.config().hidden);
  x_.resize(num_elements);
  inverse_rms_.resize(num_tokens);
  normed_.resize(num_elements);
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
  WEFT_CUDA(
      Context{},
      cudaMemcpyAsync(x_.data(), x, x_.size() * sizeof(float), cudaMemcpyDeviceToDevice, stream)
  );
  rmsnorm_forward_cuda(
      {num_tokens, rank_->config().hidden, x_.data(), gain_.value, inverse_rms_.data()},
      normed_.data(),
      stream
  );
  rank_->linear().forward(
      {num_tokens, rank_->config().hidden, kNumBytes},
      normed_.data(),
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
  rank_->linear().add_backward_weight(shape, grad_logits_.data(), normed_.data(), weight_.grad);
  scratch.grad_normed.clear(stream);
  rank_->linear().add_backward_input(
      shape, grad_logits_.data(), weight_.rounded, scratch.grad_normed.data()
  );
  WEFT_CUDA(Context{}, cudaMemsetAsync(grad_x, 0, x_.size() * sizeof(float), stream));
  rmsnorm_backward_cuda(
      {num_tokens, hidden, x_.data(), gain_.value, inverse_rms_.data()},
      scratch.grad_normed.data(),
      grad_x,
      scratch.gain_terms.data(),
      stream
  );
  column_sums_cuda(
      {scratch.gain_terms.data(),
       num_tokens,
       hidden,
       scratch.sum_parts.data(),
       gain_.grad,
       tokens_->adds_grads},
      stream
  );
}

double DeviceHead::loss() const {
  double sum = 0;
  for (const float loss : host_losses_) {
    sum += static_cast<double>(loss);
  }
  return sum * static_cast<double>(scale());
}

}  // namespace weft::moe
