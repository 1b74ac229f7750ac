// SPDX-License-Identifier: Apache-2.0
// Owners of CUDA things, freed with their scope.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "core/gpu/check.hpp"

namespace weft {

// Says when the work before it in a stream has ended, also if the stream has ended since.
class CudaEvent {
 public:
  CudaEvent() = default;
  ~CudaEvent() {
    if (event_ != nullptr) {
      static_cast<void>(cudaEventDestroy(event_));
    }
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  void create(const Context& context) {
    WEFT_CUDA(context, cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Zeroed device memory of this process only.
template <class T>
class CudaBuffer {
 public:
  CudaBuffer() = default;
  ~CudaBuffer() { static_cast<void>(cudaFree(data_)); }
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  void create(uint64_t count, const Context& context) {
    bytes_ = count * sizeof(T);
    WEFT_CUDA(context, cudaMalloc(reinterpret_cast<void**>(&data_), bytes_));
    WEFT_CUDA(context, cudaMemset(data_, 0, bytes_));
  }
  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  T* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Host memory that kernels write.
template <class T>
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() { static_cast<void>(cudaFreeHost(data_)); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  void create(uint64_t count, const Context& context) {
    WEFT_CUDA(
        context,
        cudaHostAlloc(
            reinterpret_cast<void**>(&data_),
            count * sizeof(T),
            cudaHostAllocMapped | cudaHostAllocPortable
        )
    );
    for (uint64_t i = 0; i < count; ++i) {
      data_[i] = T{};
    }
  }
  [[nodiscard]] T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace weft
