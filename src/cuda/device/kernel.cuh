// SPDX-License-Identifier: Apache-2.0
// A kernel that takes one struct as its parameter, and what the host does with it: it loads the
// code, sets how much shared memory a block may have, and launches. Every .cu file of the executor
// launches by it. The functions throw Error (kCuda).
#pragma once

#include "core/gpu/check.hpp"

namespace weft {

template <class Call>
struct Kernel {
  void (*function)(Call);
  int threads;           // of a block
  int shared_bytes = 0;  // of a block, beside what the kernel declares
};

// Loads the kernel's code, which a capture or a wait of another kernel would keep from happening.
template <class... Parameters>
cudaFuncAttributes load(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes{};
  WEFT_CUDA(Context{}, cudaFuncGetAttributes(&attributes, kernel));
  return attributes;
}

// Sets how much shared memory a block may have beside what the kernel declares.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), int bytes) {
  constexpr auto kWhat = cudaFuncAttributeMaxDynamicSharedMemorySize;
  WEFT_CUDA(Context{}, cudaFuncSetAttribute(kernel, kWhat, bytes));
}

// Prepares a kernel, once per device and before any capture.
template <class Call>
void prepare(const Kernel<Call>& kernel) {
  const cudaFuncAttributes attributes = load(kernel.function);
  if (kernel.shared_bytes != 0 && attributes.binaryVersion >= 90) {
    allow_shared(kernel.function, kernel.shared_bytes);
  }
}

// Prepares a kernel whose launches each say how much shared memory a block has. Returns the most
// that this GPU has beside what the kernel declares.
template <class... Parameters>
int prepare_for_any_shared(void (*kernel)(Parameters...)) {
  int device = 0;
  int most = 0;
  WEFT_CUDA(Context{}, cudaGetDevice(&device));
  constexpr auto kMost = cudaDevAttrMaxSharedMemoryPerBlockOptin;
  WEFT_CUDA(Context{}, cudaDeviceGetAttribute(&most, kMost, device));
  const int room = most - static_cast<int>(load(kernel).sharedSizeBytes);
  allow_shared(kernel, room);
  return room;
}

template <class Call>
void launch(
    const Kernel<Call>& kernel,
    int blocks,
    const Call& call,
    cudaStream_t stream,
    const Context& context = {}
) {
  kernel.function<<<
      static_cast<unsigned>(blocks),
      static_cast<unsigned>(kernel.threads),
      static_cast<size_t>(kernel.shared_bytes),
      stream>>>(call);
  WEFT_CUDA(context, cudaGetLastError());
}

}  // namespace weft
