// SPDX-License-Identifier: Apache-2.0
#include "train_device.hpp"

#include <algorithm>
#include <cstdlib>

#include "choices.hpp"
#include "core/gpu_probe.hpp"

namespace weft::program {
namespace {

// What the GPU executor has no answer to was meant for the host.
bool asks_for_cpu(const CLI::App& command, const TrainOptions& options) {
  const std::string& transport = options.config.transport;
  const bool has_dtype = command.count("--dtype") > 0;
  return (has_dtype && options.config.dtype != DType::kBFloat16) ||
         (transport != "auto" && transport != "peer");
}

}  // namespace

void add_device_options(CLI::App& command, TrainOptions& options) {
  command.add_option("--device", options.device, "Where the model is: GPUs if there are any")
      ->transform(Choice<DeviceChoice>(
          {{"auto", DeviceChoice::kAuto},
           {"cpu", DeviceChoice::kCpu},
           {"cuda", DeviceChoice::kCuda}},
          "auto|cpu|cuda"
      ))
      ->default_str("auto");
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

void settle_device(const CLI::App& command, TrainOptions& options) {
  if (options.device == DeviceChoice::kAuto && asks_for_cpu(command, options)) {
    options.device = DeviceChoice::kCpu;
  }
  if (options.device == DeviceChoice::kCpu) {
    return;
  }
  options.num_gpus = static_cast<int>(probe_gpus().gpus.size());
  if (options.device == DeviceChoice::kAuto) {
    options.device = options.num_gpus > 0 ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  }
  if (options.device == DeviceChoice::kCpu) {
    return;
  }
  options.config.device = {Device::Kind::kCuda, 0};
  if (command.count("--dtype") == 0) {
    options.config.dtype = DType::kBFloat16;
  }
  if (options.ranks.num_ranks > options.num_gpus) {
    options.ranks.use_threads = options.ranks.use_threads || command.count("--processes") == 0;
    // A queue for each stream, lest kernels of ranks that wait for each other stand in line.
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // NOLINT(concurrency-mt-unsafe): no threads
  }
}

Device device_of_rank(const TrainOptions& options, int rank) {
  Device device = options.config.device;
  if (device.kind == Device::Kind::kCuda) {
    device.index = rank % std::max(options.num_gpus, 1);
  }
  return device;
}

}  // namespace weft::program
