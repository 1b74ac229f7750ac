// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "measure/limits_cuda.hpp"

namespace weft::program {

std::string link_way_name(LinkWay) {
  return {};
}

GpuLinkLimits measure_gpu_limits(int, bool) {
  raise_error(ErrorCode::kNotAvailable, Context{}, "limits: this build leaves CUDA out");
}

double all_to_all_limit_gbps() {
  return 0;
}

double local_copy_limit_gbps() {
  return 0;
}

}  // namespace weft::program
