// SPDX-License-Identifier: Apache-2.0
// weft::Error becomes the exception of weft/errors.py that its code names.
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "weft/error.hpp"

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

void bind_errors(nb::module_& /*m*/) {
  nb::register_exception_translator(translate);
}

}  // namespace weft::py
