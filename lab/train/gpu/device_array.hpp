// SPDX-License-Identifier: Apache-2.0
// Memory of the current GPU that its owner keeps and reuses.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "core/check_cuda.hpp"

namespace weft::moe {

template <class T>
class DeviceArray {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  DeviceArray() = default;
  explicit DeviceArray(size_t size) { resize(size); }
  ~DeviceArray() { release(); }
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }

  // Contents are undefined afterwards; memory is kept when it shrinks, and when it grows there is
  // some to spare. Never null. Throws Error (kOutOfMemory).
  void resize(size_t size) {
    if (data_ == nullptr || size > capacity_) {
      const size_t capacity = std::max<size_t>(data_ == nullptr ? size : size + size / 4, 16);
      release();
      void* data = nullptr;
      WEFT_CUDA(Context{}, cudaMalloc(&data, capacity * sizeof(T)));
      data_ = static_cast<T*>(data);
      capacity_ = capacity;
    }
    size_ = size;
  }

  [[nodiscard]] T* data() { return data_; }
  [[nodiscard]] const T* data() const { return data_; }
  [[nodiscard]] size_t size() const { return size_; }

  void clear(cudaStream_t stream) {
    if (size_ == 0) {
      return;
    }
    WEFT_CUDA(Context{}, cudaMemsetAsync(data_, 0, size_ * sizeof(T), stream));
  }
  // As many elements as the span has. The host's memory is read, or filled, once the stream is
  // through.
  void upload(std::span<const T> from, cudaStream_t stream) {
    resize(from.size());
    if (from.empty()) {
      return;
    }
    WEFT_CUDA(
        Context{},
        cudaMemcpyAsync(data_, from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream)
    );
  }
  void download(std::span<T> to, cudaStream_t stream) const {
    if (to.empty()) {
      return;
    }
    WEFT_CUDA(
        Context{},
        cudaMemcpyAsync(to.data(), data_, to.size_bytes(), cudaMemcpyDeviceToHost, stream)
    );
  }

 private:
  void swap(DeviceArray& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }
  void release() noexcept {
    if (data_ != nullptr) {
      static_cast<void>(cudaFree(data_));
      data_ = nullptr;
    }
  }

  T* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace weft::moe
