// SPDX-License-Identifier: Apache-2.0
// The GPUs that this process can use. devices.cpp answers, or none.cpp in builds without CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

struct GpuInfo {
  std::string name;
  int major = 0;  // compute capability, "9.0"
  int minor = 0;
  int64_t memory_bytes = 0;
  int num_sms = 0;
  int64_t l2_bytes = 0;
};

struct GpuList {
  std::vector<GpuInfo> gpus;
  std::string driver;       // highest CUDA version the driver serves, "13.0"; empty without driver
  std::string runtime;      // CUDA version of this build; empty in a build without CUDA
  std::string none_reason;  // why `gpus` is empty
};

// Never throws for a missing driver or GPU: `none_reason` then says which.
[[nodiscard]] GpuList list_gpus();

inline constexpr std::string_view kNoReach = "none";

// Returns how each GPU of list_gpus() reaches the memory of each other one, [from][to]: "itself",
// kNoReach, "loads and stores" as over PCIe, or "atomics too" as over NVLink. Empty without any
// GPU. Never throws.
[[nodiscard]] std::vector<std::vector<std::string_view>> gpu_reach();

}  // namespace weft
