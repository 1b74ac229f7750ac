// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "core/gpu/device_memory.hpp"
#include "core/gpu/devices.hpp"

namespace weft {

GpuList list_gpus() {
  GpuList list;
  list.none_reason = "this build leaves CUDA out";
  return list;
}

std::vector<std::vector<std::string_view>> gpu_reach() {
  return {};
}

namespace {

[[noreturn]] void refuse(int gpu) {
  WEFT_RAISE(
      Context{},
      ErrorCode::kUnsupported,
      "memory of cuda {} is asked for (this build has no CUDA)",
      gpu
  );
}

}  // namespace

std::shared_ptr<std::byte> allocate_on_gpu(int gpu, uint64_t /*bytes*/) {
  refuse(gpu);
}

void copy_by_gpu(int gpu, std::byte* /*to*/, const std::byte* /*from*/, uint64_t /*bytes*/) {
  refuse(gpu);
}

}  // namespace weft
