// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "core/devices.hpp"
#include "moe/chunk_nodes.hpp"
#include "moe/device_model.hpp"
#include "moe/micro_batch_cuda.hpp"
#include "overlap/no_pipelining.hpp"
#include "overlap/stream_executor_cuda.hpp"

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
        rank_(parts.group, parts.context, most_tokens(parts.micro_batches)),
        replicated_(parts.layout.num_replicated),
        experts_(parts.layout.num_expert),
        mean_(parts.layout.num_expert),
        square_(parts.layout.num_expert) {
    const size_t num = parts.micro_batches.size();
    for (size_t idx = 0; idx < num; ++idx) {
      micro_batches_.emplace_back(
          rank_,
          parts.micro_batches[idx].tokens.size(),
          MicroBatchPlace{.is_first = idx == 0, .is_last = idx + 1 == num},
          parts.layout,
          DeviceMemory{replicated_.get(), experts_.get()}
      );
    }
    load_replicated();
    load_experts();
  }

  LossShare forward_backward(std::span<const Batch> batches) override;

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

  [[nodiscard]] const overlap::Trace& trace() const override { return trace_; }
  [[nodiscard]] const Plan& plan(size_t micro_batch, int block) const override {
    return micro_batches_[micro_batch].blocks()[static_cast<size_t>(block)].plan();
  }
  [[nodiscard]] std::span<const int32_t> topk_idx(int block) override {
    all_topk_idx_.clear();
    for_each_block(block, [&](DeviceBlock& of_one) { append(of_one.topk_idx(), all_topk_idx_); });
    return all_topk_idx_;
  }
  [[nodiscard]] std::span<const float> weights(int block) override {
    all_weights_.clear();
    for_each_block(block, [&](DeviceBlock& of_one) { append(of_one.weights(), all_weights_); });
    return all_weights_;
  }

 private:
  static int64_t most_tokens(std::span<const MicroBatch> micro_batches) {
    int64_t most = 0;
    for (const MicroBatch& micro_batch : micro_batches) {
      most = std::max(most, micro_batch.tokens.size());
    }
    return most;
  }
  template <class T>
  static void append(std::span<const T> from, std::vector<T>& to) {
    to.insert(to.end(), from.begin(), from.end());
  }
  template <class Visit>
  void for_each_block(int block, const Visit& visit) {
    rank_.enter();
    for (DeviceMicroBatch& micro_batch : micro_batches_) {
      visit(micro_batch.blocks()[static_cast<size_t>(block)]);
    }
  }
  void run_overlapped();
  [[nodiscard]] cudaStream_t stream() const { return rank_.stream(); }

  DeviceModelParts parts_;
  GpuRank rank_;
  DeviceVector replicated_;
  DeviceVector experts_;
  DeviceArray<float> mean_;  // of the experts
  DeviceArray<float> square_;
  std::deque<DeviceMicroBatch> micro_batches_;
  overlap::Trace trace_;
  std::vector<int32_t> all_topk_idx_;
  std::vector<float> all_weights_;
};

LossShare CudaModel::forward_backward(std::span<const Batch> batches) {
  rank_.enter();
  for (size_t idx = 0; idx < micro_batches_.size(); ++idx) {
    micro_batches_[idx].load(batches[idx]);
  }
  replicated_.grad.clear(stream());
  experts_.grad.clear(stream());
  if (parts_.overlap.is_on) {
    run_overlapped();
  } else {
    for (DeviceMicroBatch& micro_batch : micro_batches_) {
      micro_batch.forward_backward();
    }
  }
  replicated_.grad.download(parts_.memory.replicated.grad.first(replicated_.grad.size()), stream());
  for (DeviceMicroBatch& micro_batch : micro_batches_) {
    micro_batch.finish();
  }
  rank_.synchronize();
  LossShare share = {{0.0}};
  for (const DeviceMicroBatch& micro_batch : micro_batches_) {
    share += {{micro_batch.cross_entropy()}, micro_batch.balance()};
  }
  return share;
}

void CudaModel::run_overlapped() {
  const auto nodes = [&](int idx) {
    return chunk_nodes(micro_batches_[static_cast<size_t>(idx)], parts_.overlap);
  };
  const auto schedule =
      overlap::schedule_overlapped({.num = static_cast<int>(micro_batches_.size()), .nodes = nodes}
      );
  parts_.context.timer.pause();
  overlap::StreamExecutor executor(stream(), rank_.stream(overlap::Lane::kExchange));
  try {
    trace_ = executor.run(schedule);
    rank_.synchronize();  // throws what the exchange found on the GPU
  } catch (...) {
    for (DeviceMicroBatch& micro_batch : micro_batches_) {
      micro_batch.release();
    }
    rank_.forget_phases();
    throw;
  }
  rank_.read_phases();
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
