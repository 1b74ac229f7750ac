// SPDX-License-Identifier: Apache-2.0
// Stands for gpu/model.cpp in a build without CUDA.
#include "core/check.hpp"
#include "train/step_model.hpp"

namespace weft::moe {

void check_can_train_on_gpu(int index) {
  raise_error(
      ErrorCode::kUnsupported,
      Context{},
      fmt::format("train: device cuda {} (this build has only the cpu executor)", index)
  );
}

std::unique_ptr<StepModel> make_device_model(const StepModelParts& parts) {
  check_can_train_on_gpu(parts.context.exchange.config().device.index);
  return nullptr;
}

}  // namespace weft::moe
