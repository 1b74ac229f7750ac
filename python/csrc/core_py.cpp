// SPDX-License-Identifier: Apache-2.0
// weft._core: the C++ API with as little in between as possible. What torch needs is in Python.
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "weft/error.hpp"
#include "weft/version.hpp"

namespace weft::py {
namespace {

namespace nb = nanobind;

const char* class_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "InvalidArgument";
    case ErrorCode::kUnsupported:
      return "Unsupported";
    case ErrorCode::kNotAvailable:
      return "NotAvailable";
    case ErrorCode::kTimeout:
      return "TimeoutError";
    case ErrorCode::kPeerFailed:
      return "PeerError";
    case ErrorCode::kOutOfMemory:
    case ErrorCode::kTransport:
    case ErrorCode::kFile:
    case ErrorCode::kCuda:
    case ErrorCode::kInternal:
      break;
  }
  return "Error";
}

// weft::Error becomes the exception of weft/errors.py that its code names.
void translate(const std::exception_ptr& thrown, void* /*unused*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("weft.errors").attr(class_of(error.code()));
    const nb::object value =
        type(error.what(), std::string(error_code_name(error.code())), error.rank());
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

}  // namespace

}  // namespace weft::py

NB_MODULE(_core, m) {
  m.doc() = "The C++ API of Weft.";
  m.attr("__version__") = weft::version().data();  // a literal: ends with 0
  nanobind::register_exception_translator(weft::py::translate);
  weft::py::bind_group(m);
  weft::py::bind_plan(m);
  weft::py::bind_exchange(m);
  weft::py::bind_overlap(m);
  weft::py::bind_pool(m);
}
