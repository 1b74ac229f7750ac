// SPDX-License-Identifier: Apache-2.0
// What a thread sets for CUDA and puts back.
#pragma once

#include <cuda_runtime_api.h>

#include "core/check_cuda.hpp"

namespace weft {

// Makes `device` current on this thread; the caller's device returns afterwards.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device, const Context& context = {}) {
    WEFT_CUDA(context, cudaGetDevice(&before_));
    if (before_ != device) {  // to set a device makes a context there, also on the way back
      WEFT_CUDA(context, cudaSetDevice(device));
      is_changed_ = true;
    }
  }
  ~CudaDeviceGuard() {
    if (is_changed_) {
      static_cast<void>(cudaSetDevice(before_));
    }
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool is_changed_ = false;
};

// What this thread does meanwhile belongs to no capture, its own or another thread's, which by
// default forbids half of CUDA.
class RelaxedCapture {
 public:
  RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one before
};

}  // namespace weft
