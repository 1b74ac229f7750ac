// SPDX-License-Identifier: Apache-2.0
#include "device_choice.hpp"

#include <cstdlib>

#include "core/check.hpp"
#include "core/gpu_probe.hpp"

namespace weft::program {
namespace {

constexpr int kRanksOnOneGpu = 4;

}  // namespace

Device DeviceChoice::device(int rank) const {
  return is_on_gpu() ? Device{Device::Kind::kCuda, rank % num_gpus} : Device{};
}

void add_device_option(CLI::App& command, DeviceChoice& choice) {
  command.add_option("--device", choice.wanted, "auto, cpu or cuda; auto: GPUs if there are any")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

void choose_device(DeviceChoice& choice, const std::string& transport) {
  const bool is_cpu_transport = transport != "auto" && transport != "peer";
  choice.num_gpus = 0;
  if (choice.wanted == "cpu" || (choice.wanted == "auto" && is_cpu_transport)) {
    return;
  }
  // By default a GPU has 8 queues for all streams of all ranks on it.
  static_cast<void>(::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0));
  const GpuList list = probe_gpus();
  choice.num_gpus = static_cast<int>(list.gpus.size());
  WEFT_CHECK(
      Context{},
      choice.is_on_gpu() || choice.wanted == "auto",
      ErrorCode::kNotAvailable,
      "device: cuda is asked for, but there is no GPU ({})",
      list.none_reason
  );
}

void choose_ranks(const CLI::App& command, const DeviceChoice& choice, RankOptions& ranks) {
  if (choice.is_on_gpu() && command.count("--ranks") == 0) {
    ranks.num_ranks = choice.num_gpus > 1 ? choice.num_gpus : kRanksOnOneGpu;
  }
}

RankOptions with_ranks(const RankOptions& ranks, const DeviceChoice& choice, int num_ranks) {
  RankOptions result = ranks;
  result.num_ranks = num_ranks;
  if (choice.is_on_gpu() && num_ranks > choice.num_gpus) {
    result.use_threads = true;
  }
  return result;
}

}  // namespace weft::program
