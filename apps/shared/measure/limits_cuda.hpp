// SPDX-License-Identifier: Apache-2.0
// Rates of the links between the GPUs of this machine, and of their own memory. One process drives
// all GPUs. limits_cuda.cpp answers; a build without CUDA has none of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::program {

// All GPUs send to all others at once; the slowest GPU counts.
struct LinkRate {
  std::string way;   // "bulk stores 4 KB"
  int sms = 0;       // on each GPU; 0: none
  double bytes = 0;  // leaving each GPU
  double us_p50 = 0;
  double us_p99 = 0;

  [[nodiscard]] double gbps() const { return us_p50 > 0 ? bytes / us_p50 / 1e3 : 0; }
};

struct GpuLinkLimits {
  int num_gpus = 0;
  LinkRate local_copy;           // inside GPU 0, bytes read + written
  LinkRate copy_engine;          // this and what follows: nothing with one GPU
  std::vector<LinkRate> by_sms;  // every other way, by way and then ascending SMs
  double signal_us = 0;          // there and back between GPUs 0 and 1
};

// GPUs 0 .. num_gpus - 1; with one only what is inside it is measured. `is_quick` measures a few SM
// counts for tests, else takes a few seconds. Throws Error: kNotAvailable if a GPU cannot reach
// another, kOutOfMemory, kCuda, kInternal if bytes arrive wrong.
[[nodiscard]] GpuLinkLimits measure_gpu_limits(int num_gpus, bool is_quick);

// The yardstick of all percentages on GPUs, GB/s: what the copy engines move out of each GPU when
// all send to all. Takes less than a second, is remembered by the process; 0 with fewer than two
// GPUs, or where one cannot reach another.
[[nodiscard]] double all_to_all_limit_gbps();
// Read + written by a copy inside GPU 0; likewise.
[[nodiscard]] double local_copy_limit_gbps();

}  // namespace weft::program
