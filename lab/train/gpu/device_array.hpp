// SPDX-License-Identifier: Apache-2.0
// Memory of the current GPU that its owner keeps and reuses.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "core/gpu/check.hpp"

namespace weft::moe {

template <class T>
class DeviceArray {
 public:
  static_assert(std::is_trivially_copyable_v<T>);

  DeviceArray() = default;
  explicit DeviceArray(size_t size) { resize(size); }

  // Contents are undefined afterwards; memory is kept when it shrinks, and when it grows there is
  // some to spare. Never null. Throws Error (kOutOfMemory).
  void resize(size_t size) {
    if (data_ == nullptr || size > capacity_) {
      const size_t capacity = std::max<size_t>(data_ == nullptr ? size : size + size / 4, 16);
      data_.reset();
      void* data = nullptr;
      WEFT_CUDA(Context{}, cudaMalloc(&data, capacity * sizeof(T)));
      data_.reset(static_cast<T*>(data));
      capacity_ = capacity;
    }
    size_ = size;
  }

  [[nodiscard]] T* data() { return data_.get(); }
  [[nodiscard]] const T* data() const { return data_.get(); }
  [[nodiscard]] size_t size() const { return size_; }

  void clear(cudaStream_t stream) {
    if (size_ > 0) {
      WEFT_CUDA(Context{}, cudaMemsetAsync(data(), 0, size_ * sizeof(T), stream));
    }
  }
  // As many elements as the span has. The host's memory is read, or filled, once the stream is
  // through.
  void upload(std::span<const T> from, cudaStream_t stream) {
    resize(from.size());
    copy(data(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice, stream);
  }
  void download(std::span<T> to, cudaStream_t stream) const {
    copy(to.data(), data(), to.size_bytes(), cudaMemcpyDeviceToHost, stream);
  }
  // As many as this one has.
  void copy_from(const T* from, cudaStream_t stream) {
    copy(data(), from, size_ * sizeof(T), cudaMemcpyDeviceToDevice, stream);
  }

 private:
  struct Free {
    void operator()(T* data) const { static_cast<void>(cudaFree(data)); }
  };
  static void copy(
      void* to, const void* from, size_t num_bytes, cudaMemcpyKind way, cudaStream_t stream
  ) {
    if (num_bytes > 0) {
      WEFT_CUDA(Context{}, cudaMemcpyAsync(to, from, num_bytes, way, stream));
    }
  }

  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

}  // namespace weft::moe
