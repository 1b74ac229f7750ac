// SPDX-License-Identifier: Apache-2.0
// HostMath on a GPU: bf16 factors, sums in fp32, by cuBLAS (linear.cpp) and kernels of our own
// (kernels.cu). Operations have the names and the meaning that they have there; all pointers are
// memory of the GPU, bf16 is uint16_t. Each queues its work on a stream and returns; the same input
// gives the same bits. Throws Error (kCuda).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <library_types.h>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "core/gpu/check.hpp"
#include "train/layers/adamw.hpp"
#include "train/layers/math.hpp"

namespace weft::moe {

using CublasHandle = struct cublasContext*;

// Memory of the current GPU that its owner keeps and reuses.
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

// Throws Error (kNotAvailable) if there is no cuBLAS.
void check_cublas();

class DeviceMath {
 public:
  using Value = uint16_t;  // bf16
  using Sum = float;
  template <class T>
  using Array = DeviceArray<T>;

  // All work goes to `stream` of the current GPU, where every call must come from.
  explicit DeviceMath(cudaStream_t stream);
  ~DeviceMath();
  DeviceMath(const DeviceMath&) = delete;
  DeviceMath& operator=(const DeviceMath&) = delete;

  // --- products; those of no rows do nothing ---
  // In fp32 or rounded to bf16, as are gradients of the input.
  template <class Y>
  void forward(const ProductShape& s, const uint16_t* x, const uint16_t* w, Y* y) {
    run({true, false, s.out, s.rows, s.in, w, s.in, x, s.in, 0, y, kTypeOf<Y>});
  }
  void backward_input(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* w, uint16_t* grad_x
  ) {
    run({false, false, s.in, s.rows, s.out, w, s.in, grad_y, s.out, 0, grad_x, CUDA_R_16BF});
  }
  void add_backward_input(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* w, float* grad_x
  ) {
    run({false, false, s.in, s.rows, s.out, w, s.in, grad_y, s.out, 1, grad_x, CUDA_R_32F});
  }
  void add_backward_weight(
      const ProductShape& s, const uint16_t* grad_y, const uint16_t* x, float* grad_w
  ) {
    run({false, true, s.in, s.out, s.rows, x, s.in, grad_y, s.out, 1, grad_w, CUDA_R_32F});
  }

  // --- layers; the tokens are one shard ---
  void embed(const EmbeddingShape& s, const float* table, float* x);
  void embed_backward(
      const EmbeddingShape& s,
      const float* grad_x,
      const Weight<uint16_t>& table,
      const Shards& shards
  );
  void norm(const NormShape& s, uint16_t* y);
  void norm_backward(
      const NormShape& s,
      const float* grad_y,
      float* grad_x,
      const Weight<uint16_t>& gain,
      const Shards& shards
  );
  // A token whose logits are not numbers gets no experts.
  void choose_experts(const RouterShape& s);
  void router_backward(
      const RouterShape& s,
      const float* grad_weights,
      const float* grad_probs,
      uint16_t* grad_logits
  );
  void column_sums(const float* values, int64_t rows, int64_t cols, float* sums);
  void swiglu(const SwigluRows<uint16_t>& s, uint16_t* active);
  void swiglu_backward(
      const SwigluRows<uint16_t>& s,
      const uint16_t* grad_active,
      uint16_t* grad_gate_up,
      float* grad_weight
  );
  void cross_entropy(const LossShape& s, float* losses, uint16_t* grad_logits);

  // --- memory ---
  template <class T>
  void upload(std::span<const T> from, DeviceArray<T>& to) {
    to.upload(from, stream_);
  }
  template <class T>
  void download(const DeviceArray<T>& from, std::vector<T>& to) {
    to.resize(from.size());
    from.download(to, stream_);
  }
  template <class T>
  void copy(const T* from, DeviceArray<T>& to) {
    to.copy_from(from, stream_);
  }
  template <class T>
  void clear(DeviceArray<T>& array) {
    array.clear(stream_);
  }
  void add(const float* from, float* to, int64_t size);
  void widen(const uint16_t* from, float* to, int64_t size);

  // Makes room for what norm_backward() and column_sums() keep for a moment: `elements` of a matrix
  // and `cols` of its columns. Else they make it themselves.
  void reserve(size_t elements, int64_t cols);
  [[nodiscard]] cudaStream_t stream() const { return stream_; }

 private:
  template <class T>
  static constexpr cudaDataType kTypeOf = sizeof(T) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;

  // Column-major: c [m, n] = op(a) * op(b) + beta * c, with bf16 factors. A row-major matrix is the
  // transpose of a column-major one with as long columns.
  struct Product {
    bool transposes_a;
    bool transposes_b;
    int64_t m;
    int64_t n;
    int64_t k;
    const uint16_t* a;
    int64_t lda;
    const uint16_t* b;
    int64_t ldb;
    float beta;
    void* c;
    cudaDataType type_c;
  };
  void run(const Product& product);
  // Overwrites the sums, or adds to them.
  void sum_columns(const float* values, int64_t rows, int64_t cols, float* sums, bool adds);

  cudaStream_t stream_;
  CublasHandle handle_ = nullptr;
  DeviceArray<std::byte> workspace_;
  DeviceArray<float> gain_terms_;  // [num_tokens, hidden] what the gain's gradient sums
  DeviceArray<float> sum_parts_;   // [parts, cols]
};

// --- element by element, all [size] ---
void to_bf16_cuda(const float* from, uint16_t* to, int64_t size, cudaStream_t stream);
// to += from.
void add_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream);

// What AdamW updates; `rounded` gets the new values in bf16.
struct DeviceAdam {
  float* value = nullptr;
  const float* grad = nullptr;
  float* mean = nullptr;
  float* square = nullptr;
  uint16_t* rounded = nullptr;
  int64_t size = 0;
};
void adamw_update_cuda(const AdamStep& step, const DeviceAdam& adam, cudaStream_t stream);

}  // namespace weft::moe
