// SPDX-License-Identifier: Apache-2.0
// `weft limits` on GPUs.
#pragma once

#include <string>

namespace weft::program {

struct GpuLimitsOptions {
  int num_gpus = 0;  // 0: all
  bool is_quick = false;
  std::string json_path;
  std::string html_path;
};

// Measures, prints a table, writes the files. Throws Error: kNotAvailable without a GPU, kFile.
void run_gpu_limits(const GpuLimitsOptions& options);

}  // namespace weft::program
