// SPDX-License-Identifier: Apache-2.0
// Declarations that this folder shares: what <name>_py.cpp binds, and memory that Python sees.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <nanobind/nanobind.h>

#include "weft/error.hpp"
#include "weft/tensor.hpp"

namespace weft::py {

namespace nb = nanobind;

void bind_plan(nb::module_& m);
void bind_exchange(nb::module_& m);
void bind_checks(nb::module_& m);
void bind_placement(nb::module_& m);
void bind_routing(nb::module_& m);
void bind_balance(nb::module_& m);

// Returns the exception of weft/errors.py for `error`'s code.
[[nodiscard]] nb::object exception_of(const Error& error);

// Returns the cudaStream_t of torch's number.
inline void* stream_of(uintptr_t number) {
  return reinterpret_cast<void*>(number);  // NOLINT
}

// Makes a torch tensor of `tensor`'s bytes, which keeps `owner` alive.
[[nodiscard]] nb::object array_of(const Tensor& tensor, std::shared_ptr<const void> owner);

// Wraps a Python function for threads that may not hold the interpreter's lock: its last owner
// takes the lock to free it.
[[nodiscard]] std::shared_ptr<nb::callable> held_of(nb::callable function);

// Returns what Python's modules have, looked up once and kept as long as the process lives, since
// the interpreter may be gone before. A static of a function would be locked meanwhile, and Python
// may let another thread run, which would wait for that lock and not give the interpreter back.
template <class Found>
const Found& looked_up() {
  static std::atomic<const Found*> known = nullptr;
  if (const Found* found = known.load()) {
    return *found;
  }
  const Found* const made = new Found;  // NOLINT(cppcoreguidelines-owning-memory)
  const Found* others = nullptr;
  return known.compare_exchange_strong(others, made) ? *made : *others;
}

}  // namespace weft::py
