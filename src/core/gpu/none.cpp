// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "core/gpu_memory.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse(int gpu) {
  raise_error(
      ErrorCode::kUnsupported,
      Context{},
      fmt::format("memory of cuda {} is asked for (this build has no CUDA)", gpu)
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
