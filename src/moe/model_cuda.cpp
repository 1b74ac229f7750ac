// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/devices.hpp"
#include "moe/block_cuda.hpp"
#include "moe/device_model.hpp"
#include "moe/embedding.hpp"
#include "moe/head_cuda.hpp"

namespace weft::moe {
namespace {

// One of the flat vectors on the GPU.
struct DeviceVector {
  DeviceArray<float> value;
  DeviceArray<float> grad;
  DeviceArray<uint16_t> rounded;

  explicit DeviceVector(size_t size) : value(size), grad(size), rounded(size) {}
  [[nodiscard]] DeviceParameter get() { return {value.data(), grad.data(), rounded.data()}; }

  void load(std::span<const float> from, cudaStream_t stream) {
    value.upload(from, stream);
    to_bf16_cuda(value.data(), rounded.data(), static_cast<int64_t>(from.size()), stream);
  }
};

class CudaModel final : public DeviceModel {
 public:
  explicit CudaModel(const DeviceModelParts& parts)
      : parts_(parts),
        rank_(parts.group, parts.context, num_tokens_of(parts.context.shards)),
        replicated_(parts.layout.num_replicated),
        experts_(parts.layout.num_expert),
        mean_(parts.layout.num_expert),
        square_(parts.layout.num_expert),
        head_(
            rank_,
            replicated_.get().at(parts.layout.final_norm),
            replicated_.get().at(parts.layout.head)
        ) {
    const DeviceMemory memory = {replicated_.get(), experts_.get()};
    blocks_.reserve(parts.layout.blocks.size());
    for (const BlockLayout& block : parts.layout.blocks) {
      blocks_.emplace_back(rank_, block, memory);
    }
    x_.resize(static_cast<size_t>(rank_.num_tokens() * rank_.config().hidden));
    load_replicated();
    load_experts();
  }

  LossShare forward_backward(const Batch& batch) override;

  void update_experts(const AdamStep& step) override {
    rank_.enter();
    adamw_update_cuda(
        step,
        experts_.value.data(),
        experts_.grad.data(),
        {mean_.data(), square_.data()},
        experts_.rounded.data(),
        experts_.value.size(),
        rank_.stream()
    );
    rank_.synchronize();
  }

  void load_replicated() override {
    rank_.enter();
    replicated_.load(parts_.memory.replicated.value.first(replicated_.value.size()), stream());
    rank_.synchronize();
  }

  void load_experts() override {
    rank_.enter();
    experts_.load(parts_.memory.experts.value, stream());
    mean_.upload(parts_.expert_moments.mean, stream());
    square_.upload(parts_.expert_moments.square, stream());
    rank_.synchronize();
  }

  void store_experts() override {
    rank_.enter();
    experts_.value.download(parts_.memory.experts.value, stream());
    mean_.download(parts_.expert_moments.mean, stream());
    square_.download(parts_.expert_moments.square, stream());
    rank_.synchronize();
  }

  [[nodiscard]] const Plan& plan(int block) const override {
    return blocks_[static_cast<size_t>(block)].plan();
  }
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override {
    rank_.enter();
    return blocks_[static_cast<size_t>(block)].topk_idx();
  }
  [[nodiscard]] std::span<const float> weights(int block) override {
    rank_.enter();
    return blocks_[static_cast<size_t>(block)].weights();
  }

 private:
  static int64_t num_tokens_of(const Shards& shards) {
    return shards.empty() ? 0 : shards.back().end;
  }
  [[nodiscard]] cudaStream_t stream() const { return rank_.stream(); }

  DeviceModelParts parts_;
  GpuRank rank_;
  DeviceVector replicated_;
  DeviceVector experts_;
  DeviceArray<float> mean_;  // of the experts
  DeviceArray<float> square_;
  DeviceHead head_;
  std::vector<DeviceBlock> blocks_;
  DeviceArray<uint8_t> windows_;  // [num_tokens, window]
  DeviceArray<float> x_;          // [num_tokens, hidden], then its gradient
};

LossShare CudaModel::forward_backward(const Batch& batch) {
  rank_.enter();
  const ModelConfig& model = rank_.config();
  const std::span windows(
      reinterpret_cast<const uint8_t*>(batch.windows.data()), batch.windows.size()
  );
  windows_.upload(windows, stream());
  replicated_.grad.clear(stream());
  experts_.grad.clear(stream());

  const DeviceParameter table = replicated_.get().at(parts_.layout.embedding);
  const EmbeddingShape tokens = {rank_.num_tokens(), model.window, model.hidden, windows_.data()};
  embedding_forward_cuda(tokens, table.value, x_.data(), stream());
  for (DeviceBlock& block : blocks_) {
    block.forward(x_.data());
  }
  LossShare share;
  share.cross_entropy = {head_.forward_backward(x_.data(), batch.targets)};
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
    block->backward(x_.data());
  }
  embedding_backward_cuda(tokens, x_.data(), table.grad, stream());

  replicated_.grad.download(parts_.memory.replicated.grad.first(replicated_.grad.size()), stream());
  rank_.synchronize();
  for (const DeviceBlock& block : blocks_) {
    share.balance += block.balance_share() / static_cast<double>(blocks_.size());
  }
  return share;
}

}  // namespace

void check_can_train_on_gpu(int index) {
  const GpuList list = list_gpus();
  const auto num_gpus = static_cast<int>(list.gpus.size());
  WEFT_CHECK(
      Context{},
      num_gpus > 0,
      ErrorCode::kNotAvailable,
      "train: device cuda {} ({})",
      index,
      list.none_reason
  );
  WEFT_CHECK_ARG(
      Context{},
      index >= 0 && index < num_gpus,
      "train: device cuda {} (this machine has {})",
      index,
      num_gpus
  );
  static_cast<void>(cublas());
}

std::unique_ptr<DeviceModel> make_device_model(const DeviceModelParts& parts) {
  return std::make_unique<CudaModel>(parts);
}

}  // namespace weft::moe
