// SPDX-License-Identifier: Apache-2.0
// Tensors cross the border as DLPack: views of what Python holds, and arrays that own a Buffer.
#pragma once

#include <memory>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <optional>

#include "weft/tensor.hpp"

namespace weft::py {

namespace nb = nanobind;

using Array = nb::ndarray<>;
using MaybeArray = std::optional<Array>;

// A contiguous 2-D array, or 1-D as one column. FP8 and every other one-byte type is kByte. Throws
// Error (kInvalidArgument) with `name` for anything that Weft cannot take.
[[nodiscard]] Tensor view_of(const Array& array, const char* name);
[[nodiscard]] Tensor view_of(const MaybeArray& array, const char* name);  // absent: not given

// What Python sees of `tensor`: `owner` lives as long as the array does. `shape` says how its
// elements are cut; their number must be the tensor's.
[[nodiscard]] nb::object array_of(
    const Tensor& tensor, std::shared_ptr<const void> owner, std::initializer_list<size_t> shape
);

}  // namespace weft::py
