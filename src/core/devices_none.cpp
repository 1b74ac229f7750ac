// SPDX-License-Identifier: Apache-2.0
#include "core/devices.hpp"

namespace weft {

GpuList list_gpus() {
  GpuList list;
  list.none_reason = "this build leaves CUDA out";
  return list;
}

std::string_view gpu_reach_name(GpuReach) {
  return {};
}

std::vector<std::vector<GpuReach>> gpu_reach() {
  return {};
}

}  // namespace weft
