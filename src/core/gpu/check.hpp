// SPDX-License-Identifier: Apache-2.0
// Checks of CUDA calls, and what a thread sets for CUDA and puts back. Only files of the CUDA parts
// include it.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "core/context.hpp"

namespace weft {

// Throws Error (kOutOfMemory or kCuda): "<expression>: <CUDA's text> (<CUDA's name>)". The last two
// stand for the caller's place.
[[noreturn]] void raise_cuda_error(
    cudaError_t status,
    const char* expression,
    const Context& context,
    const char* file = __builtin_FILE(),
    int line = __builtin_LINE()
);

}  // namespace weft

// Makes a CUDA call that must succeed.
#define WEFT_CUDA(context, expr)                                    \
  do {                                                              \
    const cudaError_t weft_cuda_status = (expr);                    \
    if (weft_cuda_status != cudaSuccess) [[unlikely]] {             \
      ::weft::raise_cuda_error(weft_cuda_status, #expr, (context)); \
    }                                                               \
  } while (false)

namespace weft {

// Makes `device` current on this thread; afterwards the caller's device is current again.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device, const Context& context = {}) : device_(device) {
    WEFT_CUDA(context, cudaGetDevice(&before_));
    if (before_ != device_) {  // to set a device makes a context there, also on the way back
      WEFT_CUDA(context, cudaSetDevice(device_));
    }
  }
  ~CudaDeviceGuard() {
    if (before_ != device_) {
      static_cast<void>(cudaSetDevice(before_));
    }
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int device_;
  int before_ = 0;
};

// Scope in which this thread's work belongs to no capture, its own or another thread's, which by
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

// Logs that a deleter of `what` failed while CUDA still runs.
void log_not_given_back(std::string_view what, cudaError_t status);

// Runs `step`, which returns a cudaError_t, on `device`, for deleters: CUDA may already be shut
// down, and no caller could act on an error.
template <class Step>
void on_device_quietly(int device, std::string_view what, Step step) {
  const RelaxedCapture no_capture;
  int before = -1;
  static_cast<void>(cudaGetDevice(&before));
  if (cudaSetDevice(device) == cudaSuccess) {
    const cudaError_t status = step();
    log_not_given_back(what, status);
  }
  if (before >= 0 && before != device) {
    static_cast<void>(cudaSetDevice(before));
  }
  static_cast<void>(cudaGetLastError());
}

}  // namespace weft
