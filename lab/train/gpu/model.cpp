// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/gpu/devices.hpp"
#include "train/gpu/rank.hpp"
#include "train/step_model.hpp"

namespace weft::moe {
namespace {

// One of the flat vectors on the GPU.
struct DeviceVector {
  DeviceArray<float> value;
  DeviceArray<float> grad;
  DeviceArray<uint16_t> rounded;

  explicit DeviceVector(size_t size) : value(size), grad(size), rounded(size) {}
  [[nodiscard]] Weight<uint16_t> get() { return {value.data(), rounded.data(), grad.data()}; }

  void load(std::span<const float> from, cudaStream_t stream) {
    value.upload(from, stream);
    to_bf16_cuda(value.data(), rounded.data(), static_cast<int64_t>(from.size()), stream);
  }
};

class CudaModel final : public MicroBatchModels<GpuRank> {
 public:
  explicit CudaModel(const StepModelParts& parts)
      : MicroBatchModels(parts),
        replicated_(parts.layout.num_replicated),
        experts_(parts.layout.num_expert),
        mean_(parts.layout.num_expert),
        square_(parts.layout.num_expert) {
    make_models({replicated_.get(), experts_.get()});
    load_replicated();
    load_experts();
  }

  LossShare forward_backward(std::span<const Batch> batches) override {
    rank_.enter();
    replicated_.grad.clear(stream());
    experts_.grad.clear(stream());
    run(batches, [this](const overlap::Schedule& schedule) { return run_schedule(schedule); });
    replicated_.grad.download(
        parts_.memory.replicated.grad.first(replicated_.grad.size()), stream()
    );
    return share();
  }

  void update_experts(const AdamStep& step) override {
    rank_.enter();
    const DeviceAdam adam = {
        experts_.value.data(),
        experts_.grad.data(),
        mean_.data(),
        square_.data(),
        experts_.rounded.data(),
        static_cast<int64_t>(experts_.value.size())};
    adamw_update_cuda(step, adam, stream());
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
    mean_.upload(parts_.expert_moments->mean, stream());
    square_.upload(parts_.expert_moments->square, stream());
    rank_.synchronize();
  }

  void store_experts() override {
    rank_.enter();
    experts_.value.download(parts_.memory.experts.value, stream());
    mean_.download(parts_.expert_moments->mean, stream());
    square_.download(parts_.expert_moments->square, stream());
    rank_.synchronize();
  }

 private:
  overlap::Trace run_schedule(const overlap::Schedule& schedule) {
    overlap::Trace trace;
    try {
      trace = overlap::run_on_streams(schedule, stream(), rank_.stream(overlap::Lane::kExchange));
      rank_.synchronize();  // throws what the exchange found on the GPU
    } catch (...) {
      rank_.forget_phases();
      throw;
    }
    rank_.read_phases();
    return trace;
  }

  [[nodiscard]] cudaStream_t stream() const { return rank_.stream(); }

  DeviceVector replicated_;
  DeviceVector experts_;
  DeviceArray<float> mean_;  // of the experts
  DeviceArray<float> square_;
};

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
  check_cublas();
}

std::unique_ptr<StepModel> make_device_model(const StepModelParts& parts) {
  return std::make_unique<CudaModel>(parts);
}

}  // namespace weft::moe
