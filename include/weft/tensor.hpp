// SPDX-License-Identifier: Apache-2.0
// Views of row-major matrices that the caller owns. Nothing here allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace weft {

// kByte is opaque payload (FP8 of any kind, FP4 pairs, raw scale bytes): it can be dispatched, not
// summed.
enum class DType : uint8_t { kBFloat16, kFloat16, kFloat32, kByte, kBool, kInt32, kInt64 };

[[nodiscard]] constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    case DType::kByte:
    case DType::kBool:
      return 1;
  }
  return 0;
}

[[nodiscard]] std::string_view dtype_name(DType dtype);

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// A [rows, cols] matrix whose elements of a row are adjacent. `row_stride` counts elements; -1
// means `cols`.
template <class Byte>
struct BasicTensor {
  Byte* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = -1;
  Device device = {};

  // A default view stands for "not given"; a given one may still have zero rows.
  [[nodiscard]] bool is_given() const { return data != nullptr || cols != 0; }
  [[nodiscard]] bool is_contiguous() const {
    return row_stride < 0 || row_stride == cols || rows <= 1;
  }
  [[nodiscard]] int64_t row_bytes() const { return cols * dtype_bytes(dtype); }
  [[nodiscard]] int64_t num_bytes() const { return rows * row_bytes(); }

  // A writable view converts to a read-only one.
  operator BasicTensor<const std::byte>() const requires(!std::is_const_v<Byte>) {
    return {data, dtype, rows, cols, row_stride, device};
  }
};

using Tensor = BasicTensor<std::byte>;
using ConstTensor = BasicTensor<const std::byte>;

namespace detail {
template <class T>
constexpr DType dtype_of() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t> || std::is_same_v<T, bool> || std::is_same_v<T, std::byte>);
  return std::is_same_v<T, float>     ? DType::kFloat32
         : std::is_same_v<T, int32_t> ? DType::kInt32
         : std::is_same_v<T, int64_t> ? DType::kInt64
         : std::is_same_v<T, bool>    ? DType::kBool
                                      : DType::kByte;
}
}  // namespace detail

// View of typed CPU memory: `matrix(ptr, rows, cols)`. 16-bit floats have no C++ type here: build
// the view by hand.
template <class T>
[[nodiscard]] Tensor matrix(T* data, int64_t rows, int64_t cols) {
  return {reinterpret_cast<std::byte*>(data), detail::dtype_of<T>(), rows, cols};
}
template <class T>
[[nodiscard]] ConstTensor matrix(const T* data, int64_t rows, int64_t cols) {
  return {reinterpret_cast<const std::byte*>(data), detail::dtype_of<T>(), rows, cols};
}

}  // namespace weft
