// SPDX-License-Identifier: Apache-2.0
// Tensors of torch, read and made by C entry points that are looked up in the process. Nothing is
// compiled or linked against torch, so one build serves every version of it. Where a torch lacks an
// entry point (that for reading came with 2.10), weft/outputs.py does the same, more slowly.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "bind.hpp"
#include "weft/tensor.hpp"

namespace weft::py {

// torch's own numbers (c10::ScalarType), which its files and its C entry points share.
enum class ScalarType : int32_t {
  kUint8 = 0,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3 = 24
};

// Returns the bit of a type among those that suits() takes.
constexpr uint64_t bit(ScalarType type) {
  return uint64_t{1} << static_cast<int>(type);
}

// View that the core has of a tensor: a matrix without gaps, or a vector as one column.
struct Given {
  nb::object owner;  // of the memory; a copy if the caller's tensor has gaps
  Tensor tensor;     // not given where the caller's is None
  std::optional<ScalarType> type;
};

// `name`: of the argument, for what is refused. Raises what `view` of weft/outputs.py does.
[[nodiscard]] Given read_needed(const char* name, nb::handle tensor);
// Reads blocks of rows [any, any, cols], which are one matrix, like read_needed().
[[nodiscard]] Given read_blocks(const char* name, nb::handle tensor);
// Reads a tensor like read_needed(), or None.
[[nodiscard]] Given read(const char* name, nb::handle tensor);
// Reads a matrix of any type, which the core moves as bytes, or None.
[[nodiscard]] Given read_bytes(const char* name, nb::handle tensor);
// Reads numbers one after the other as one row, or None.
[[nodiscard]] Given read_vector(const char* name, nb::handle tensor);

// Checks a tensor, or none, that the call writes, or that others write meanwhile: raises if it has
// gaps, as a copy would be of no use. Tells autograd if the call `writes`.
[[nodiscard]] Given at_place(const char* name, nb::handle tensor, Given given, bool writes = true);

// True if it is a tensor of a shape (an int, or anything else for any size) and of a type whose bit
// `types` has. False also where only Python can tell.
[[nodiscard]] bool suits(nb::handle tensor, uint64_t types, nb::handle shape);
// Overload with less to look up; -1 stands for any size.
[[nodiscard]] bool suits(nb::handle tensor, uint64_t types, std::span<const int64_t> shape);
// Returns the size of a dimension that the tensor has.
[[nodiscard]] int64_t size_of(nb::handle tensor, int dim);

[[nodiscard]] DType core_type(ScalarType type);
[[nodiscard]] int64_t scalar_bytes(ScalarType type);
// Views array bytes as [rows, cols].
[[nodiscard]] nb::object tensor_of_bytes(
    nb::handle array, int64_t rows, int64_t cols, ScalarType type
);

// Sizes and strides, of at most three dimensions.
struct Shape {
  int num_dims;
  std::array<int64_t, 3> sizes;
  std::array<int64_t, 3> strides;
};

// Part of memory that several tensors share.
struct Part {
  int64_t rows;
  int64_t cols;
  Shape shape;
};

// Makes tensors of one device, whose contents are undefined, for the current stream. Python gets
// them together, which costs a fraction of as many calls of torch.
class NewTensors {
 public:
  explicit NewTensors(Device device) : device_(device) {}
  ~NewTensors();
  NewTensors(NewTensors&& other) noexcept;
  NewTensors& operator=(NewTensors&& other) = delete;
  NewTensors(const NewTensors&) = delete;
  NewTensors& operator=(const NewTensors&) = delete;

  // [rows, cols]. Raises what torch.empty_strided does.
  Tensor add(int64_t rows, int64_t cols, ScalarType type);
  // Adds the same memory, which Python sees with these sizes and strides.
  Tensor add(int64_t rows, int64_t cols, ScalarType type, const Shape& shape);
  // Adds an existing tensor.
  void add(nb::object tensor);
  // Adds two tensors of a type in one piece of memory, the first at its begin, by one allocation.
  std::array<Tensor, 2> add_both(ScalarType type, const Part& first, const Part& second);
  // Cuts tensor `place`, in the order of add(), to its first rows.
  void shorten(size_t place, int64_t rows, int64_t cols);
  // Returns the tensors in the order of add(); once.
  [[nodiscard]] std::vector<nb::object> take();

 private:
  // Makes a torch handle; null where Python has to make the tensor, or say why not.
  [[nodiscard]] void* make(const Shape& shape, ScalarType type) const;
  // Handle of part of another tensor's memory, from an element on; null where that cannot be.
  [[nodiscard]] static void* make_part(void* whole, const Shape& shape, int64_t begin);
  Tensor add_made(void* handle, int64_t rows, int64_t cols, ScalarType type);

  Device device_;
  std::vector<void*> handles_;       // null where the tensor is in objects_
  std::vector<nb::object> objects_;  // as many
};

}  // namespace weft::py
