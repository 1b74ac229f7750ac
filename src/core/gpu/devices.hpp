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
  int num_sms = 0;  // this and the next: 0 from probe_gpus()
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

// How one GPU reaches another's memory.
enum class GpuReach : uint8_t {
  kItself,
  kNone,
  kCopies,   // loads and stores, no atomics: over PCIe
  kAtomics,  // and atomics, as NVLink has them
};

[[nodiscard]] std::string_view gpu_reach_name(GpuReach reach);

// [from][to] over the GPUs of list_gpus(); empty without any. Never throws.
[[nodiscard]] std::vector<std::vector<GpuReach>> gpu_reach();

// Which GPUs there are, asked in a child process: a process that has used CUDA must not fork ranks
// that use it.

// What list_gpus() says, without CUDA being touched in this process. Call it before starting
// threads. At most 30 s; `none_reason` says what went wrong.
[[nodiscard]] GpuList probe_gpus();

}  // namespace weft
