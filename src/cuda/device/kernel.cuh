// SPDX-License-Identifier: Apache-2.0
// A kernel that takes a call, with what a launch of it needs.
#pragma once

#include "core/gpu/check.hpp"

namespace weft {

template <class Call>
struct Kernel {
  void (*function)(Call);
  int threads;           // of a block
  int shared_bytes = 0;  // of a block, beside what the kernel declares
};

// Once per device and before any capture.
template <class Call>
void prepare(const Kernel<Call>& kernel) {
  cudaFuncAttributes attributes{};
  WEFT_CUDA(Context{}, cudaFuncGetAttributes(&attributes, kernel.function));
  if (kernel.shared_bytes != 0 && attributes.binaryVersion >= 90) {
    WEFT_CUDA(
        Context{},
        cudaFuncSetAttribute(
            kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes
        )
    );
  }
}

template <class Call>
void launch(const Kernel<Call>& kernel, int blocks, const Call& call, cudaStream_t stream) {
  kernel.function<<<
      static_cast<unsigned>(blocks),
      static_cast<unsigned>(kernel.threads),
      static_cast<size_t>(kernel.shared_bytes),
      stream>>>(call);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
