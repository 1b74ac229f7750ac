// SPDX-License-Identifier: Apache-2.0
// Owners of CUDA things, freed with their scope.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "core/gpu/check.hpp"

namespace weft {

// A deleter that calls one CUDA function, whose error no caller could act on.
template <auto kFunction>
struct CudaDeleter {
  void operator()(auto* thing) const { static_cast<void>(kFunction(thing)); }
};

// An event that ends with the work before it in a stream, even if the stream has ended since.
class CudaEvent {
 public:
  void create(const Context& context) {
    cudaEvent_t event = nullptr;
    WEFT_CUDA(context, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_.reset(event);
  }
  [[nodiscard]] cudaEvent_t get() const { return event_.get(); }

 private:
  std::unique_ptr<CUevent_st, CudaDeleter<cudaEventDestroy>> event_;
};

// Device memory of this process only, zeroed before what follows in `stream`.
template <class T>
class CudaBuffer {
 public:
  void create(uint64_t count, cudaStream_t stream, const Context& context) {
    void* data = nullptr;
    bytes_ = count * sizeof(T);
    WEFT_CUDA(context, cudaMalloc(&data, bytes_));
    data_.reset(static_cast<T*>(data));
    WEFT_CUDA(context, cudaMemsetAsync(data, 0, bytes_, stream));
  }
  [[nodiscard]] T* get() const { return data_.get(); }
  [[nodiscard]] uint64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<T, CudaDeleter<cudaFree>> data_;
  uint64_t bytes_ = 0;
};

// Host memory that kernels write.
template <class T>
class PinnedBuffer {
 public:
  void create(uint64_t count, const Context& context) {
    constexpr auto kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
    void* data = nullptr;
    WEFT_CUDA(context, cudaHostAlloc(&data, count * sizeof(T), kFlags));
    data_.reset(static_cast<T*>(data));
    std::fill_n(data_.get(), count, T{});
  }
  [[nodiscard]] T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T, CudaDeleter<cudaFreeHost>> data_;
};

}  // namespace weft
