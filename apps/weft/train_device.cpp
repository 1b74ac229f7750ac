// SPDX-License-Identifier: Apache-2.0
#include "train_device.hpp"

#include "choices.hpp"

namespace weft::program {

void add_train_device_options(CLI::App& command, TrainOptions& options) {
  add_device_option(command, options.device);
  command.add_option("--dtype", options.config.dtype, "Type of the rows that travel")
      ->transform(Choice<DType>(
          {{"fp32", DType::kFloat32},
           {"float32", DType::kFloat32},
           {"bf16", DType::kBFloat16},
           {"bfloat16", DType::kBFloat16}},
          "fp32|bf16"
      ))
      ->default_str("fp32, on GPUs bf16")
      ->group("Model");
}

void choose_train_device(const CLI::App& command, TrainOptions& options) {
  const bool has_dtype = command.count("--dtype") > 0;
  if (has_dtype && options.config.dtype != DType::kBFloat16 && options.device.wanted == "auto") {
    options.device.wanted = "cpu";  // GPUs have no answer to it
  }
  choose_device(options.device, options.config.transport);
  if (!options.device.is_on_gpu()) {
    return;
  }
  options.config.device = options.device.device(0);
  if (!has_dtype) {
    options.config.dtype = DType::kBFloat16;
  }
  if (command.count("--processes") == 0) {
    options.ranks = with_ranks(options.ranks, options.device, options.ranks.num_ranks);
  }
}

}  // namespace weft::program
