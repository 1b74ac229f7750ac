// SPDX-License-Identifier: Apache-2.0
// What the files of this folder share: what <name>_py.cpp binds, and memory that Python sees.
#pragma once

#include <memory>
#include <nanobind/nanobind.h>

#include "weft/error.hpp"
#include "weft/tensor.hpp"

namespace weft::py {

namespace nb = nanobind;

void bind_plan(nb::module_& m);
void bind_exchange(nb::module_& m);

// The exception of weft/errors.py that the code of `error` names.
[[nodiscard]] nb::object exception_of(const Error& error);

// A torch tensor of the bytes of `tensor`; `owner` lives as long as it does.
[[nodiscard]] nb::object array_of(const Tensor& tensor, std::shared_ptr<const void> owner);

}  // namespace weft::py
